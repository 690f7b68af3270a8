"""The steps of one epoch, with little Python in each."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from lockstep.engines.jax.outside import GROUPS
from lockstep.engines.jax.steps.ahead import Ahead
from lockstep.engines.jax.steps.input import HostIterator
from lockstep.engines.jax.steps.reading import Reading, whole
from lockstep.engines.jax.steps.scan import most_batches
from lockstep.engines.jax.steps.step import Kept, StepFunction

# keras/src/backend/jax/trainer.py, JAXTrainer: between steps the state is in `_jax_state`,
# and `jax_state_sync`, which a callback's `self.model` calls, puts it into the variables
# and says so in `_jax_state_synced`.


Begin = Callable[[int], None]
End = Callable[[int, Any], None]
Each = Callable[[Any], None]


@dataclass(frozen=True)
class Kind:
    """Training, evaluating or predicting.

    Attributes:
        function: Where the model keeps its step function.
        stop: The attribute by which a callback stops it.
        state: The groups of variables that a step takes and returns, in its order.
    """

    function: str
    stop: str
    state: tuple[str, ...]


_WEIGHTS = ("trainable_variables", "non_trainable_variables")
TRAIN = Kind("train_function", "stop_training", GROUPS)
TEST = Kind("test_function", "stop_evaluating", (*_WEIGHTS, "metrics_variables"))
PREDICT = Kind("predict_function", "stop_predicting", _WEIGHTS)

NO_BATCH: dict[str, Any] = {}
"""The outputs of an epoch without a step."""


def run_epoch(
    model: Any,
    kind: Kind,
    batches: HostIterator,
    begin: Begin,
    end: End,
    each: Each | None = None,
) -> Any:
    """The steps of one epoch; the outputs of the last one are returned, or `NO_BATCH`.

    Args:
        model: The model.
        kind: What is done with it.
        batches: What yields the batches.
        begin: Is called with the number of the first step of those that follow.
        end: Is called with the number of the last step, and its outputs.
        each: Is called with the outputs of every step, or of those that are one execution.
    """
    attributes = vars(model)
    current = Current(kind.state)
    outputs: Any = NO_BATCH
    # Set past the tracking of attributes, which looks at every array of every step.
    attributes["_jax_state_synced"] = True
    pace = batches.pace
    if pace is not None:
        pace.begin_epoch(batches.num_batches, lambda: jax.block_until_ready(current.kept))
    try:
        with batches.catch_stop_iteration():
            for first, last, iterator in batches:
                begin(first)
                step = getattr(model, kind.function)
                if isinstance(step, StepFunction):
                    times = last - first + 1
                    alone = (times == 1 and batches.pace is None) or batches.unseen
                    if alone and step.alone and batches.ahead.is_empty:
                        most = times if first else 1  # the progress bar times the first
                        outputs, taken, over = _each(
                            model, kind, current, batches, iterator, most, each
                        )
                    else:
                        times = 1 if batches.unseen else times
                        outputs, taken = _execute(model, step, current, batches, iterator, times)
                        over = taken < times
                        if each is not None:
                            each(outputs)
                    if step.ahead and batches.may_look_ahead(last + 1):
                        batches.ahead.look(step, current.kept[-1][1], iterator, times)
                else:  # a callback has released the model
                    if attributes["_jax_state_synced"]:
                        _read(model, current)
                    rest = itertools.chain(batches.ahead.drawn(iterator), iterator)
                    current.kept[:] = [step(current.kept[-1][1], rest)]
                    outputs, taken, over = current.kept[-1][0], 1, False
                    if each is not None:
                        each(outputs)
                if batches.pace is not None or batches.unseen:
                    last = batches.took(first, taken)
                else:  # as many as Keras would take
                    over = False
                end(last, outputs)
                # Data that have ended say so where Keras would draw next, also if they stop it.
                if getattr(model, kind.stop) and not over:
                    break
        batches.check_epoch()
        batches.settle()
        if batches.in_place and current.kept:
            jax.block_until_ready(current.get("metrics_variables"))
    except BaseException as error:
        try:
            model.jax_state_sync()
        finally:
            batches.settle(waiting=isinstance(error, Exception))
            if batches.in_place and isinstance(error, Exception):
                with contextlib.suppress(Exception):
                    jax.block_until_ready(current.kept)
        raise
    finally:
        if pace is not None:
            pace.end_epoch()
    return outputs


UNSEEN = 0.01
"""Seconds of steps one after the other, at most, where nobody looks between two of them. The
progress bar draws 20 times a second."""


def _each(
    model: Any,
    kind: Kind,
    current: "Current",
    source: HostIterator,
    iterator: Iterator[Any],
    most: int,
    each: Each | None,
) -> tuple[Any, int, bool]:
    """What `_execute` does for steps that run alone, so many of them at most.

    Returns:
        The outputs of the last one, how many were taken, and whether the data have ended.
    """
    attributes = vars(model)
    step: StepFunction = getattr(model, kind.function)
    kept, run, look = current.kept, step.run, step.look
    as_they_are = step.takes_arrays and source.gives_arrays
    reading = run.program if isinstance(run, Reading) else None
    outputs: Any = None
    taken = 0
    until = time.monotonic() + UNSEEN
    while True:
        try:
            batch = next(iterator)
        except Exception as error:
            if taken and isinstance(error, StopIteration):
                return outputs, taken, True
            source.broke_off = error
            raise
        # Who draws batches may be code of the user's, and may have asked for the model.
        if attributes["_jax_state_synced"]:
            _read(model, current, step)
        placed = batch if as_they_are else step.place(batch)
        state = kept[-1][1]
        if look is not None:
            placed = look(run, state, placed)
        # An interrupt finds the state before the step or the one after it.
        if reading is not None:  # which leaves the one before as it was
            outputs, changed = reading(state, placed)
            kept[0] = (outputs, whole(state, changed) if changed else state)
        else:  # what it returns is in the list before Python looks for signals
            kept.extend(map(run, (state,), (placed,)))
            del kept[0]
            outputs = kept[0][0]
        if step.finish is not None:
            outputs = step.finish(outputs)
        if each is not None:
            each(outputs)
        del batch, placed, state  # not to be held while the next ones are drawn
        taken += 1
        if taken == most or time.monotonic() > until or getattr(model, kind.stop):
            return outputs, taken, False
        if getattr(model, kind.function) is not step:
            return outputs, taken, False


def _execute(
    model: Any,
    step: StepFunction,
    current: "Current",
    source: HostIterator,
    iterator: Any,
    times: int,
) -> tuple[Any, int]:
    """So many steps, or as many as there are batches for; and how many that were."""
    kept, ahead = current.kept, source.ahead
    if step.assigned is not None and vars(model)["_jax_state_synced"]:
        step.assigned.note()
    every: list[Any] = []
    taken = 0
    while taken < times:
        wanted = 1 if taken else source.at_most(times)
        try:
            batches = source.agreed(partial(_draw, ahead, step, iterator, wanted), step.assigned)
        except StopIteration:
            if not taken:
                raise
            break
        placed_ahead = ahead.programs(step)
        if step.pace is not None and step.pace.times is None:
            step.pace.at_most(most_batches(batches[0]))
        if vars(model)["_jax_state_synced"]:  # by a callback, or at the start
            _read(model, current, step)
        for run, placed in placed_ahead or step.programs(kept[-1][1], batches):
            state = kept[-1][1]
            if step.look is not None:
                placed = step.look(run, state, placed)
            # What the program returns is in the list before Python looks for signals,
            # so that an interrupt finds the state before the step or the one after.
            kept.extend(map(run, (state,), (placed,)))
            del kept[0]
            every.append(kept[0][0])
            if step.one_at_a_time:
                jax.block_until_ready(every[-1])
        taken += len(batches)
        if len(batches) > 1:  # all that there are
            break
    return step.outputs(every), taken


def _draw(ahead: Ahead, step: StepFunction, iterator: Any, times: int) -> list[Any]:
    return ahead.drawn(iterator) or step.pull(iterator, times)


def _read(model: Any, current: "Current", step: StepFunction | None = None) -> None:
    """Take the state as it stands in the variables, which let go of it."""
    attributes = vars(model)
    groups = dict.fromkeys(current.names, True)
    read: tuple[Any, ...] = model._get_jax_state(**groups)
    state = read if step is None else step.settle(read)
    # Before the variables let go of it: an exception would otherwise lose it.
    current.kept[:] = [(None, state)]
    attributes["_jax_state"] = current
    attributes["_jax_state_synced"] = False
    model._purge_model_variables(**groups)


class Current:
    """The state between two steps, where Keras looks for it when a callback wants the model.

    Attributes:
        names: The groups of variables in the state.
        kept: What the steps returned: outputs and state. The last one counts.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.kept: Kept = []

    def get(self, name: str, default: Any = None) -> Any:
        """The values of a group of variables, as JAXTrainer.jax_state_sync asks for them."""
        return self.kept[-1][1][self.names.index(name)] if name in self.names else default
