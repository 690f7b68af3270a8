"""Runs the steps of a model on JAX, with its state outside of its variables.

Between two steps of Keras's JAX loops the variables are empty, and an attribute of the model has
their values. A training step donates these arrays: only the outputs of its program then have the
weights. The loop therefore stores the returned state before an exception can be raised.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import keras
import numpy as np

from lockstep.core.engine import PREDICT, Kind
from lockstep.core.held_signals import HeldSignals, handle_held, held
from lockstep.core.status import STATUS_OF_PROCESS
from lockstep.engines.jax.steps.padded import fetched
from lockstep.engines.jax.steps.scan import runs_of_alike
from lockstep.engines.jax.steps.variable_sync import GROUPS, sync_to_variables, to_default_device
from lockstep.keras_compat import (
    JAX_STATE,
    JAX_STATE_SYNCED,
    empty_variables,
    is_stacking,
    take_jax_state,
    trainer_class,
    unstacked,
)
from lockstep.processes.agreement import DataCheck
from lockstep.processes.variable_drift import VariableDrift
from lockstep.training.input import HostIterator

State = tuple[Any, ...]
Program = Callable[[State, Any], tuple[Any, State]]
Draw = Callable[[int], list[Any]]
"""Draws at most so many batches; raises `StopIteration` if there is none."""

_WEIGHTS = ("trainable_variables", "non_trainable_variables")
GROUPS_OF = {"train": GROUPS, "test": (*_WEIGHTS, "metrics_variables"), "predict": _WEIGHTS}
"""The groups of variables that a step takes and returns, in order, by the kind of step."""


class LiveState:
    """Hold the state before or after a step, in the place where Keras syncs it from.

    Args:
        model: The model.
        names: The groups of variables in the state.
        state: The values of the groups, if they have been read.
    """

    def __init__(self, model: Any, names: tuple[str, ...], state: State = ()) -> None:
        self.names = names
        self._attributes = vars(model)  # bypasses tracking, which visits each array
        self._kept: list[tuple[Any, State]] = [(None, state)]

    @property
    def state(self) -> State:
        """The values of the groups."""
        return self._kept[-1][1]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the values of a group of variables, for JAXTrainer.jax_state_sync."""
        return self.state[self.names.index(name)] if name in self.names else default

    def run(self, program: Program, batch: Any) -> Any:
        """Run a program on the state and a batch, and store the state that it returns.

        After an exception the state is either the one before the program or the one after it.
        Signals are held back (`is_whole`) while the old arrays are donated and the new ones are not
        stored. Outside of `Execution`, `extend` stores the new state before Python handles signals.
        That holds if JAX calls the program without Python, which is every call but the first.

        Returns:
            The outputs of the program.
        """
        kept = self._kept
        kept.extend(map(program, (kept[-1][1],), (batch,)))
        if len(kept) == 1:  # the program has no batch, and `extend` takes that as its own end
            raise StopIteration
        del kept[0]
        STATUS_OF_PROCESS.stepped()
        if held:
            handle_held()
        return kept[0][0]

    def read(self, state: State) -> None:
        """Set the state to values that were read from the variables."""
        self._kept[:] = [(None, state)]

    def stand(self) -> None:
        """Become the state that `jax_state_sync` writes into the variables."""
        self._attributes[JAX_STATE] = self
        self._attributes[JAX_STATE_SYNCED] = False

    def wait(self) -> None:
        """Wait for the last program."""
        jax.block_until_ready(self._kept)

    def is_whole(self) -> bool:
        """Return whether no array of the state has been donated."""
        return not any(value.is_deleted() for value in jax.tree.leaves(self.state))


def is_whole(model: Any) -> bool:
    """Return whether every value of the model is in its variables or in its state."""
    state = vars(model).get(JAX_STATE)
    if vars(model).get(_BUSY):
        return False
    return not isinstance(state, LiveState) or state.is_whole()


_BUSY = "_lockstep_busy"


@contextmanager
def uninterrupted(model: Any) -> Iterator[None]:
    """Hold signals back inside the context, within a loop of the model.

    Python code of JAX may run in a callback of the garbage collector, where Python drops the
    exception of a signal.
    """
    vars(model)[_BUSY] = True
    try:
        yield
    finally:
        del vars(model)[_BUSY]


class Execution(HeldSignals):
    """Run steps of a model inside the context, with the state out of its variables.

    However the context ends, the variables have the state before a step or after it.

    Args:
        model: The model.
        kind: The kind of steps.
        batches: The iterator over the batches; `None` for batches that are given one by one.
        gathers_metrics: Whether metrics go to the default device at the end. They compute their
            results operation by operation, which every device would repeat.
    """

    def __init__(
        self,
        model: Any,
        kind: Kind,
        batches: HostIterator | None = None,
        *,
        gathers_metrics: bool = False,
    ) -> None:
        super().__init__()
        self._model = model
        self._attributes = vars(model)  # bypasses Keras's tracking, which visits every array
        self._kind = kind
        self._batches = batches
        self._gathers_metrics = gathers_metrics and kind is not PREDICT
        self._live = LiveState(model, GROUPS_OF[kind.name])
        self._outputs: Any = None

    def may_interrupt(self) -> bool:
        """Return whether every value of the model is in its variables or in its state."""
        return is_whole(self._model)

    def begin(self) -> Any:
        """Return the function that runs steps."""
        self._attributes[JAX_STATE_SYNCED] = True
        return self.step

    def finish(self, error: BaseException | None) -> None:
        """Put the values back into the variables."""
        self._model.jax_state_sync()
        if self._gathers_metrics and error is None:
            to_default_device(self._model.metrics_variables)

    def step(self, iterator: Iterator[Any], times: int) -> Any:
        """Run `times` steps, or fewer if the batches end first, and return their outputs."""
        step = self._kind.function_of(self._model)
        if not isinstance(step, StepFunction):  # user code wraps a step function
            self._take_out()
            return self._live.run(step, iterator)
        if step.assigned is not None and self._attributes[JAX_STATE_SYNCED]:
            step.assigned.note()
        source = self._batches
        if source is None:
            return fetched(self._run(step, step.draws(iterator), times))
        draw = partial(_drawn, source, step, iterator)
        outputs = self._run(step, draw, times)
        if source.at_once:  # an interrupt waits for all programs that were begun: two at most
            before, self._outputs = self._outputs, outputs
            jax.block_until_ready(before)
        # Later steps do not change what a callback has been given.
        return fetched(outputs) if self._kind is PREDICT and source.watched else outputs

    def wait(self) -> None:
        """Wait for the last program."""
        self._live.wait()

    def _run(self, step: "StepFunction", draw: Draw, times: int) -> Any:
        return step.execute(self._live, draw, times, partial(self._take_out, step))

    def _take_out(self, step: "StepFunction | None" = None) -> None:
        """Move the state out of the variables, where a callback or user code has synced it."""
        if not self._attributes[JAX_STATE_SYNCED]:
            return
        live, groups = self._live, dict.fromkeys(self._live.names, True)
        read: tuple[Any, ...] = take_jax_state(self._model, **groups)
        live.read(read if step is None else step.settle(read))
        # Store the state before the variables are emptied: an exception would lose it otherwise.
        live.stand()
        empty_variables(self._model, **groups)


def _drawn(
    source: HostIterator, step: "StepFunction", iterator: Iterator[Any], most: int
) -> list[Any]:
    return source.agreed(partial(step.pull, iterator, source.at_most(most)), step.assigned)


class ModelCall(HeldSignals):
    """Run a method of a model inside the context; the variables have values at its end.

    It may be a method of the user's own, which ends in Keras's loops.

    Args:
        model: The model.
        end: Called at the end.
    """

    def __init__(self, model: Any, end: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._model = model
        self._end_of_call = end

    def may_interrupt(self) -> bool:
        """Return whether every value of the model is in its variables or in its state."""
        return is_whole(self._model)

    def begin(self) -> Any:
        """Begin with values in the variables, of a loop too whose callback calls the method."""
        sync_to_variables(self._model)
        vars(self._model)[JAX_STATE] = None  # an earlier call may have left a state

    def finish(self, error: BaseException | None) -> None:
        """Put the values back into the variables, and forget the state."""
        self._model.jax_state_sync()
        vars(self._model)[JAX_STATE] = None
        self._end_of_call()


def take_out(model: Any, purge_model_variables: bool = False, **groups: bool) -> State:
    """Take the state out as Keras does, and store it in the model if variables are emptied.

    Keras keeps the state in a local variable of `fit`, where an interrupt loses it.
    """
    state: State = take_jax_state(trainer_class(), model, **groups)
    if purge_model_variables:
        LiveState(model, tuple(name for name in GROUPS if groups.get(name)), state).stand()
        empty_variables(model, **groups)
    return state


@dataclass(frozen=True)
class StepFunction:
    """Run one execution: `times` steps, or fewer if the batches end first.

    Attributes:
        place: Puts a host batch on the mesh.
        settle: Turns a state read from variables into a state that `run` takes. A state that `run`
            returned needs no settling.
        run: The program. It takes a state and a placed batch, and returns outputs and the next
            state. A compiled training program donates the arrays of its state.
        finish: Turns the outputs of `run` into rows of predictions; `None` for logs.
        times: `steps_per_execution`.
        check_program: Checks a program before its first batch of a shape, prints warnings about it,
            and returns the batch in the layout that the program needs.
        batches_to_pull: Returns the number of batches to draw before the first step runs. `None`:
            one.
        stack: Returns one program for the steps of several batches, and its argument; `None` if the
            batches run one by one.
        data_check: Raises if processes have different batches; `None` in one process.
        to_local: Returns this process's copy of the outputs; `None` in one process.
        assigned: The values that this process has assigned to variables; `None` in one process.
        one_at_a_time: Whether each step finishes before the next one is called.
        is_short: Returns whether a step with a state and a placed batch takes so little that the
            call of its program matters; `None` if steps cannot run at once.
        model: The model. Its state between two steps is where Keras's loops have it.
    """

    place: Callable[[Any], Any]
    settle: Callable[[State], State]
    run: Program
    finish: Callable[[Any], Any] | None
    times: int
    check_program: Callable[[Program, State, Any], Any] | None = None
    batches_to_pull: Callable[[Any, int], int] | None = None
    stack: Callable[[State, list[Any]], tuple[Program, Any] | None] | None = None
    data_check: DataCheck | None = None
    to_local: Callable[[Any], Any] | None = None
    assigned: VariableDrift | None = None
    one_at_a_time: bool = False
    is_short: Callable[[State, Any], bool] | None = None
    model: Any = None

    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        """Run one execution in Keras's protocol, and return the outputs and the next state."""
        # keras/src/backend/jax/trainer.py, JAXTrainer._make_function
        if self.times > 1 and is_stacking(iterator):
            iterator = unstacked(next(iterator))
        live = _state_of_keras(self.model, state)
        live.read(self.settle(live.state))
        return fetched(self.execute(live, self.draws(iterator), self.times)), live.state

    def draws(self, iterator: Iterator[Any]) -> Draw:
        """Return what draws batches from an iterator that compares nothing itself."""
        seen = self.data_check
        noted = iterator if seen is None else seen.each(iterator)

        def draw(times: int) -> list[Any]:
            batches = partial(self.pull, noted, times)
            return batches() if seen is None else seen.agreed(batches, None, self.assigned)

        return draw

    def execute(
        self,
        live: LiveState,
        draw: Draw,
        times: int,
        take_out: Callable[[], object] = lambda: None,
    ) -> Any:
        """Run `times` steps, or fewer if the batches end first.

        Args:
            live: The state. It is updated after each step.
            draw: Draws the batches.
            times: The number of steps, at least 1.
            take_out: Called before steps. It reads a state that is in the variables.

        Returns:
            The outputs of the execution.
        """
        every: list[Any] = []
        taken = 0  # stacked steps have one output
        while taken < times:
            try:
                batches = draw(1 if taken else times)
            except StopIteration:
                if not taken:
                    raise
                break
            take_out()
            every += self.run_each(live, self.programs(live.state, batches))
            taken += len(batches)
            if len(batches) > 1:  # one pull has drawn all batches
                break
        return self.outputs(every)

    def run_each(self, live: LiveState, programs: Iterable[tuple[Program, Any]]) -> list[Any]:
        """Run these programs in order, and return their outputs."""
        every: list[Any] = []
        for run, placed in programs:
            if self.check_program is not None:
                placed = self.check_program(run, live.state, placed)
            every.append(live.run(run, placed))
            if self.one_at_a_time:
                jax.block_until_ready(every[-1])
        return every

    def pull(self, iterator: Iterator[Any], times: int) -> list[Any]:
        """Draw the batches of `times` steps, or only the first one if they cannot be stacked.

        In the second case the caller draws the others one by one, as Keras does.

        Raises:
            StopIteration: If the iterator has no batch.
        """
        first = next(iterator)
        if times > 1 and self.batches_to_pull is not None:
            return [first, *itertools.islice(iterator, self.batches_to_pull(first, times) - 1)]
        return [first]

    def programs(self, state: State, batches: list[Any]) -> Iterable[tuple[Program, Any]]:
        """Return the programs to run for these batches, in order, with their arguments."""
        if self.stack is None or len(batches) == 1:
            return [(self.run, self.place(batch)) for batch in batches]
        return self._grouped(state, batches)

    def _grouped(self, state: State, batches: list[Any]) -> Iterator[tuple[Program, Any]]:
        for alike in runs_of_alike(batches):
            group = self.stack(state, alike) if self.stack and len(alike) > 1 else None
            if group is not None:
                yield group
            else:
                yield from ((self.run, self.place(batch)) for batch in alike)

    def outputs(self, every: list[Any]) -> Any:
        """Combine the outputs of the steps of one execution: all rows, or the last logs."""
        if self.to_local is not None:
            every = [self.to_local(outputs) for outputs in every]
        if self.finish is None:
            return every[-1]
        if len(every) == 1:
            return self.finish(every[0])
        whole = map(self.finish, every)
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *whole)


def _state_of_keras(model: Any, state: State) -> LiveState:
    """Return the holder of a state that a Keras loop passes to a step function."""
    standing = vars(model).get(JAX_STATE)
    if isinstance(standing, LiveState) and standing.state is state:
        return standing
    live = LiveState(model, GROUPS_BY_NUMBER[len(state)], state)
    if not getattr(model, JAX_STATE_SYNCED):  # else a custom loop, whose variables keep values
        live.stand()
    return live


GROUPS_BY_NUMBER = {len(names): names for names in GROUPS_OF.values()}
