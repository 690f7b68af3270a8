"""The steps of one epoch, with little Python in each."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from lockstep.engines.jax.steps.ahead import Ahead
from lockstep.engines.jax.steps.input import HostIterator
from lockstep.engines.jax.steps.scan import most_batches
from lockstep.engines.jax.steps.step import StepFunction

# keras/src/backend/jax/trainer.py, JAXTrainer: between steps the state is in `_jax_state`,
# and `jax_state_sync`, which a callback's `self.model` calls, puts it into the variables
# and says so in `_jax_state_synced`.


Begin = Callable[[int], None]
End = Callable[[int, Any], None]


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
TRAIN = Kind(
    "train_function", "stop_training", (*_WEIGHTS, "optimizer_variables", "metrics_variables")
)
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
) -> Any:
    """The steps of one epoch; the outputs of the last one are returned, or `NO_BATCH`."""
    attributes = vars(model)
    current = _Current(kind.state)
    outputs: Any = NO_BATCH
    # Set past the tracking of attributes, which looks at every array of every step.
    attributes["_jax_state_synced"] = True
    pace = batches.pace
    if pace is not None:
        pace.begin_epoch(
            batches.num_batches, lambda: jax.block_until_ready([state for _, state in current.kept])
        )
    try:
        with batches.catch_stop_iteration():
            for first, last, iterator in batches:
                begin(first)
                step = getattr(model, kind.function)
                if isinstance(step, StepFunction):
                    times = last - first + 1
                    if times == 1 and step.plain and batches.ahead.is_empty:
                        outputs, taken = _step(model, step, current, batches, iterator), 1
                    else:
                        outputs, taken = _execute(model, step, current, batches, iterator, times)
                    if step.ahead and batches.may_look_ahead(last + 1):
                        batches.ahead.look(step, current.kept[-1][1], iterator, times)
                else:  # a callback has released the model
                    if attributes["_jax_state_synced"]:
                        _read(model, current)
                    rest = itertools.chain(batches.ahead.drawn(iterator), iterator)
                    current.kept[:] = [step(current.kept[-1][1], rest)]
                    outputs, taken = current.kept[-1][0], 1
                if batches.pace is not None:
                    last = batches.took(first, taken)
                end(last, outputs)
                if getattr(model, kind.stop):
                    break
        batches.check_epoch()
        batches.settle()
    except BaseException as error:
        try:
            model.jax_state_sync()
        finally:
            batches.settle(waiting=isinstance(error, Exception))
        raise
    finally:
        if pace is not None:
            pace.end_epoch()
    return outputs


def _step(
    model: Any, step: StepFunction, current: "_Current", source: HostIterator, iterator: Any
) -> Any:
    """What `_execute` does where there is one step and nothing beside it."""
    try:
        batch = next(iterator)
    except Exception as error:
        source.broke_off = error
        raise
    if vars(model)["_jax_state_synced"]:
        _read(model, current, step)
    kept = current.kept
    kept.extend(map(step.run, (kept[-1][1],), (step.place(batch),)))
    del kept[0]
    outputs = kept[0][0]
    return outputs if step.finish is None else step.finish(outputs)


def _execute(
    model: Any,
    step: StepFunction,
    current: "_Current",
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


def _read(model: Any, current: "_Current", step: StepFunction | None = None) -> None:
    """Take the state as it stands in the variables, which let go of it."""
    attributes = vars(model)
    groups = dict.fromkeys(current.names, True)
    state: tuple[Any, ...] = model._get_jax_state(**groups)
    if step is not None:
        state = step.settle(state)
    # Before the variables let go of it: an exception would otherwise lose it.
    current.kept[:] = [(None, state)]
    attributes["_jax_state"] = current
    attributes["_jax_state_synced"] = False
    model._purge_model_variables(**groups)


class _Current:
    """The state between two steps, where Keras looks for it when a callback wants the model.

    Attributes:
        names: The groups of variables in the state.
        kept: What the steps returned: outputs and state. The last one counts.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.kept: list[tuple[Any, Any]] = []

    def get(self, name: str, default: Any = None) -> Any:
        """The values of a group of variables, as JAXTrainer.jax_state_sync asks for them."""
        return self.kept[-1][1][self.names.index(name)] if name in self.names else default
