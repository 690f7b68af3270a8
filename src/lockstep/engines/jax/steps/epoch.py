"""The loop over the steps of one epoch, with little Python per step."""

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax

from lockstep.engines.jax.steps.live_state import GROUPS_OF, LiveState, with_values_back
from lockstep.engines.jax.steps.read_only_step import ReadOnlyStep
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
    """Run the steps of one epoch; see `Session.run_epoch`.

    `each` gets the outputs of every step, or of the steps of one execution.
    """
    live = LiveState(model, GROUPS_OF[kind.name])
    # Bypass Keras's attribute tracking, which visits every array at every step.
    vars(model)[JAX_STATE_SYNCED] = True
    body = partial(_run_epoch, model, kind, live, batches, begin, end, each)
    with phase(kind.phase, compiles=True):
        return with_values_back(model, body, model.jax_state_sync)


def _run_epoch(
    model: Any,
    kind: Kind,
    live: LiveState,
    batches: HostIterator,
    begin: Begin,
    end: End,
    each: Each | None,
) -> Any:
    attributes = vars(model)
    outputs: Any = NO_BATCH
    policy = batches.policy
    try:
        with batches.catch_stop_iteration():
            for first, last, iterator in batches:
                begin(first)
                step = kind.function_of(model)
                if isinstance(step, StepFunction):
                    times = last - first + 1
                    if (times == 1 or policy.no_batch_hooks) and step.alone:
                        most = times if first else 1  # the progress bar times the first step
                        outputs, taken, over = _each(
                            model, kind, live, batches, iterator, most, each
                        )
                    else:
                        times = 1 if policy.no_batch_hooks else times
                        outputs, taken = _execute(model, step, live, batches, iterator, times)
                        over = taken < times
                        if each is not None:
                            each(outputs)
                else:  # user code wraps a step function
                    if attributes[JAX_STATE_SYNCED]:
                        _take_out(model, live)
                    outputs, taken, over = live.run(step, iterator), 1, False
                    if each is not None:
                        each(outputs)
                if policy.no_batch_hooks:
                    last = batches.took(first, taken)
                else:  # as in Keras, `last` is the last planned step
                    over = False
                end(last, outputs)
                # If the data have ended, the next draw reports it, as in Keras, even after a stop.
                if getattr(model, kind.stop) and not over:
                    break
        batches.check_epoch()
        batches.settle()
        if policy.in_place and outputs is not NO_BATCH:
            jax.block_until_ready(live.get("metrics_variables"))
    except BaseException as error:
        batches.settle(waiting=isinstance(error, Exception))
        if policy.in_place and isinstance(error, Exception):
            with contextlib.suppress(Exception):
                live.wait()
        raise
    return outputs


UNSEEN = 0.01
"""The longest time in seconds that steps run without a callback in between. The progress bar
draws 20 times a second."""


def _each(
    model: Any,
    kind: Kind,
    live: LiveState,
    source: HostIterator,
    iterator: Iterator[Any],
    most: int,
    each: Each | None,
) -> tuple[Any, int, bool]:
    """Run up to `most` steps of a single process, one batch at a time.

    Returns:
        The outputs of the last step, the number of steps, and whether the data have ended.
    """
    attributes = vars(model)
    step: StepFunction = getattr(model, kind.function)
    run, check_program = step.run, step.check_program
    reads = run.program if isinstance(run, ReadOnlyStep) else None
    as_they_are = step.takes_arrays and source.gives_arrays
    outputs: Any = None
    taken = 0
    until = time.monotonic() + UNSEEN
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            if taken:
                return outputs, taken, True
            raise
        # User code that draws batches may have synced the state into the variables.
        if attributes[JAX_STATE_SYNCED]:
            _take_out(model, live, step)
        placed = batch if as_they_are else step.place(batch)
        if check_program is not None:
            placed = check_program(run, live.state, placed)
        outputs = live.run(run, placed) if reads is None else live.run_read_only(reads, placed)
        if step.finish is not None:
            outputs = step.finish(outputs)
        if each is not None:
            each(outputs)
        del batch, placed  # free the memory before the next draw
        taken += 1
        if taken == most or time.monotonic() > until or getattr(model, kind.stop):
            return outputs, taken, False
        if getattr(model, kind.function) is not step:
            return outputs, taken, False


def _execute(
    model: Any,
    step: StepFunction,
    live: LiveState,
    source: HostIterator,
    iterator: Any,
    times: int,
) -> tuple[Any, int]:
    """Run `times` steps, or fewer if the batches end first.

    Returns:
        The outputs of the execution, and the number of steps that ran.
    """
    if step.assigned is not None and vars(model)[JAX_STATE_SYNCED]:
        step.assigned.note()

    def pull(most: int) -> list[Any]:
        return source.agreed(partial(step.pull, iterator, source.at_most(most)), step.assigned)

    def take_out(_: bool) -> None:
        if vars(model)[JAX_STATE_SYNCED]:  # synced by a callback, or the first step
            _take_out(model, live, step)

    return step.execute(live, pull, times, take_out)


def _take_out(model: Any, live: LiveState, step: StepFunction | None = None) -> None:
    """Move the current state out of the variables into `live`."""
    groups = dict.fromkeys(live.names, True)
    read: tuple[Any, ...] = take_jax_state(model, **groups)
    live.read(read if step is None else step.settle(read))
    # Store the state before the variables are emptied: an exception would lose it otherwise.
    live.stand()
    empty_variables(model, **groups)
