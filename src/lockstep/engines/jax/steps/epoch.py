"""The loop over the steps of one epoch, with little Python per step."""

from functools import partial
from typing import Any

from lockstep.engines.jax.steps.live_state import GROUPS_OF, LiveState, with_values_back
from lockstep.engines.jax.steps.step import StepFunction
from lockstep.keras_compat import JAX_STATE_SYNCED, empty_variables, take_jax_state
from lockstep.launch.status import phase
from lockstep.training.input import HostIterator
from lockstep.training.session import NO_BATCH, Begin, Each, End, Kind


def run_epoch(
    model: Any,
    kind: Kind,
    batches: HostIterator,
    begin: Begin,
    end: End,
    each: Each | None = None,
) -> Any:
    """Run the steps of one epoch; see `Session.run_epoch`."""
    live = LiveState(model, GROUPS_OF[kind.name])
    # Bypass Keras's attribute tracking, which visits every array at every step.
    vars(model)[JAX_STATE_SYNCED] = True

    def body() -> Any:
        outputs: Any = NO_BATCH
        with batches.catch_stop_iteration():
            for first, last, iterator in batches:
                begin(first)
                step = kind.function_of(model)
                if isinstance(step, StepFunction):
                    outputs = _execute(model, step, live, batches, iterator, last - first + 1)
                else:  # user code wraps a step function
                    _take_out_if_synced(model, live)
                    outputs = live.run(step, iterator)
                if each is not None:
                    each(outputs)
                end(last, outputs)
                if getattr(model, kind.stop):
                    break
        batches.check_epoch()
        return outputs

    with phase(kind.phase, compiles=True):
        return with_values_back(model, body, model.jax_state_sync)


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
