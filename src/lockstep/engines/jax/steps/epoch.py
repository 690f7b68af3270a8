"""The executions of one epoch on JAX, with little Python for each."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lockstep.engines.jax.steps.live_state import GROUPS_OF, LiveState, with_values_back
from lockstep.engines.jax.steps.step import StepFunction
from lockstep.keras_compat import JAX_STATE_SYNCED, empty_variables, take_jax_state
from lockstep.training.input import HostIterator
from lockstep.training.session import Execute, Kind


def run_epoch(model: Any, kind: Kind, batches: HostIterator, run: Callable[[Execute], Any]) -> Any:
    """Run the steps of one epoch; see `Session.epoch`."""
    live = LiveState(model, GROUPS_OF[kind.name])
    # Bypass Keras's attribute tracking, which visits every array at every step.
    vars(model)[JAX_STATE_SYNCED] = True

    def execute(iterator: Iterator[Any], times: int) -> Any:
        step = kind.function_of(model)
        if isinstance(step, StepFunction):
            return _execute(model, step, live, batches, iterator, times)
        _take_out_if_synced(model, live)  # user code wraps a step function
        return live.run(step, iterator)

    return with_values_back(model, partial(run, execute), model.jax_state_sync)


def _execute(
    model: Any,
    step: StepFunction,
    live: LiveState,
    source: HostIterator,
    iterator: Any,
    times: int,
) -> Any:
    """Run `times` steps, or fewer if the batches end first, and return their outputs."""
    if step.assigned is not None and vars(model)[JAX_STATE_SYNCED]:
        step.assigned.note()

    def pull(most: int) -> list[Any]:
        return source.agreed(partial(step.pull, iterator, source.at_most(most)), step.assigned)

    def take_out(_: bool) -> None:
        _take_out_if_synced(model, live, step)

    return step.execute(live, pull, times, take_out)


def _take_out_if_synced(model: Any, live: LiveState, step: StepFunction | None = None) -> None:
    """Move the state out of the variables into `live`, if a callback or user code has synced it."""
    if not vars(model)[JAX_STATE_SYNCED]:
        return
    groups = dict.fromkeys(live.names, True)
    read: tuple[Any, ...] = take_jax_state(model, **groups)
    live.read(read if step is None else step.settle(read))
    # Store the state before the variables are emptied: an exception would lose it otherwise.
    live.stand()
    empty_variables(model, **groups)
