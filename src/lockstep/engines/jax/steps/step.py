"""One step function: what Keras calls, and its parts."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import keras
import numpy as np

from lockstep.engines.jax.on_devices.sharded import fetched
from lockstep.engines.jax.several.agreement import Seen
from lockstep.engines.jax.several.assigned import Assigned
from lockstep.engines.jax.steps.pace import Pace
from lockstep.engines.jax.steps.scan import runs_of_alike

State = tuple[Any, ...]
Step = Callable[[State, Any], tuple[Any, State]]
Program = Step
Kept = list[tuple[Any, State]]
"""What steps have returned: outputs and state. The last one counts."""


@dataclass(frozen=True)
class StepFunction:
    """What Keras calls a step function, and its parts.

    Attributes:
        place: From a batch of the host to one on the mesh.
        settle: From a state that was read out of variables to one that `run` takes.
            What `run` returned needs no settling.
        run: State and placed batch in, outputs and the next state out. Where it is
            compiled, the state that went in is gone afterwards.
        finish: Of predictions, from what `run` gives to the rows; `None` for logs.
        times: `steps_per_execution`.
        look: Says what is to be said before this program takes this batch, if anything, and
            gives the batch as the program is to have it.
        at_once: Of so many batches like this one, how many are drawn before the first of
            them runs: all, or one. `None` for one.
        together: From batches that can be stacked to a program for all of their steps and
            what it takes; or `None` where they are to be run one by one.
        seen: Raises where the batches are not those that every process has, or `None`.
        here: From outputs over several processes to what this one has of them, or `None`.
        pace: Finds out how many steps go into one program, where that is left open.
        assigned: What this process has assigned to variables, or `None`.
        one_at_a_time: Whether a step is waited for before the next one is called.
        ahead: Whether the next batches are drawn and placed before the callbacks of a step.
        takes_arrays: Whether `place` leaves a batch as it is that `Arrays.native` is true of.
    """

    place: Callable[[Any], Any]
    settle: Callable[[State], State]
    run: Program
    finish: Callable[[Any], Any] | None
    times: int
    look: Callable[[Program, State, Any], Any] | None = None
    at_once: Callable[[Any, int], int] | None = None
    together: Callable[[State, list[Any]], tuple[Program, Any] | None] | None = None
    seen: Seen | None = None
    here: Callable[[Any], Any] | None = None
    pace: Pace | None = None
    assigned: Assigned | None = None
    one_at_a_time: bool = False
    ahead: bool = False
    takes_arrays: bool = False

    @cached_property
    def alone(self) -> bool:
        """Whether a step draws a batch, places it and runs, and has no other process to heed."""
        several = self.seen, self.here, self.assigned
        return all(each is None for each in several) and not (self.one_at_a_time or self.ahead)

    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        """`times` steps, or as many as the iterator has batches for, in Keras's protocol."""
        # keras/src/backend/jax/trainer.py, JAXTrainer._make_function
        kept: Kept = [(None, state)]
        return self.steps(kept, iterator), kept[-1][1]

    def steps(self, kept: Kept, iterator: Iterator[Any]) -> Any:
        """The outputs of these steps, the state after each of which is in `kept` at once.

        Args:
            kept: Has the state before them. The last one in it counts whenever an interrupt comes.
            iterator: What yields the batches.
        """
        seen = self.seen
        noted = iterator if seen is None else seen.each(iterator)

        def pull(times: int) -> list[Any]:
            batches = partial(self.pull, noted, times)
            return batches() if seen is None else seen.agreed(batches, None, self.assigned)

        every: list[Any] = []
        taken = 0  # the outputs of several steps may be one
        while taken < self.times:
            try:
                batches = pull(1 if taken else self.times)
            except StopIteration:
                if not taken:
                    raise
                break
            if not taken:
                kept[:] = [(None, self.settle(kept[-1][1]))]
            for run, placed in self.programs(kept[-1][1], batches):
                state = kept[-1][1]
                if self.look is not None:
                    placed = self.look(run, state, placed)
                # Before Python looks for signals: an interrupt would lose the state.
                kept.extend(map(run, (state,), (placed,)))
                del kept[0]
                if self.one_at_a_time:
                    jax.block_until_ready(kept[0][0])
                every.append(kept[0][0])
            taken += len(batches)
            if len(batches) > 1:  # all that there are
                break
        return fetched(self.outputs(every))

    def pull(self, iterator: Iterator[Any], times: int) -> list[Any]:
        """The batches of so many steps, or the first of them where they are not to be stacked.

        Then the others are drawn one by one, each after the step before it, as Keras does.

        Raises:
            StopIteration: Of the iterator, where there is none.
        """
        first = next(iterator)
        if times > 1 and self.at_once is not None:
            return [first, *itertools.islice(iterator, self.at_once(first, times) - 1)]
        return [first]

    def programs(self, state: State, batches: list[Any]) -> Iterable[tuple[Program, Any]]:
        """What to run for these batches, one after the other, and with what."""
        if self.together is None or len(batches) == 1:
            return ((self.run, self.place(batch)) for batch in batches)
        return self._grouped(state, batches)

    def _grouped(self, state: State, batches: list[Any]) -> Iterator[tuple[Program, Any]]:
        for alike in runs_of_alike(batches):
            group = self.together(state, alike) if self.together and len(alike) > 1 else None
            if group is not None:
                yield group
            else:
                yield from ((self.run, self.place(batch)) for batch in alike)

    def outputs(self, every: list[Any]) -> Any:
        """The outputs of one execution, out of those of its steps: all rows, or the last logs."""
        if self.here is not None:
            every = [self.here(outputs) for outputs in every]
        if self.finish is None:
            return every[-1]
        if len(every) == 1:
            return self.finish(every[0])
        whole = map(self.finish, every)
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *whole)
