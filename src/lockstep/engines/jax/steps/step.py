"""The step function that Keras calls, and its parts."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import keras
import numpy as np

from lockstep.engines.jax.steps.live_state import LiveState, Program, State, state_of_keras
from lockstep.engines.jax.steps.padded import fetched
from lockstep.engines.jax.steps.scan import runs_of_alike
from lockstep.keras_compat import is_stacking, unstacked
from lockstep.processes.agreement import DataCheck
from lockstep.processes.variable_drift import VariableDrift

Step = Program


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
    model: Any = None

    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        """Run one execution in Keras's protocol, and return the outputs and the next state."""
        # keras/src/backend/jax/trainer.py, JAXTrainer._make_function
        if self.times > 1 and is_stacking(iterator):
            iterator = unstacked(next(iterator))
        live = state_of_keras(self.model, state)
        return self.steps(live, iterator), live.state

    def steps(self, live: LiveState, iterator: Iterator[Any]) -> Any:
        """Run one execution and return its outputs.

        Args:
            live: The state. It is updated after each step.
            iterator: The iterator over the batches.
        """
        seen = self.data_check
        noted = iterator if seen is None else seen.each(iterator)

        def pull(times: int) -> list[Any]:
            batches = partial(self.pull, noted, times)
            return batches() if seen is None else seen.agreed(batches, None, self.assigned)

        def settle(first: bool) -> None:
            if first:
                live.read(self.settle(live.state))

        return fetched(self.execute(live, pull, self.times, settle))

    def execute(
        self,
        live: LiveState,
        pull: Callable[[int], list[Any]],
        times: int,
        take_out: Callable[[bool], object],
    ) -> Any:
        """Run `times` steps, or fewer if the batches end first.

        Args:
            live: The state. It is updated after each step.
            pull: Draws at most so many batches; raises `StopIteration` if there is none.
            times: The number of steps, at least 1.
            take_out: Called before steps, with whether they are the first ones. It reads a state
                that is in the variables.

        Returns:
            The outputs of the execution.
        """
        every: list[Any] = []
        taken = 0  # stacked steps have one output
        while taken < times:
            try:
                batches = pull(1 if taken else times)
            except StopIteration:
                if not taken:
                    raise
                break
            take_out(not taken)
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
