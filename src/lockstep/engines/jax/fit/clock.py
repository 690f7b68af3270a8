"""Timing of the steps of a fit."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.experimental import sparse

from lockstep.engines.jax.on_devices.padded import PaddedArray
from lockstep.engines.jax.steps.step import StepFunction
from lockstep.training.callbacks import StepTimer

EXECUTIONS = 4
"""The smallest number of timed executions. Batches are drawn while the devices run the execution
before."""


class Clock(StepTimer):
    """Time the steps of an epoch, and end training after `most` steps.

    Steps and rows are counted where a program runs. Keras numbers the steps that an execution has
    room for, and the data may not fill all of them.

    Lockstep's loops recognize this class and run as without it, except that they call it after
    every step or execution. It waits for the devices only before the first timed step and after the
    last one.

    Its attributes are those of `lockstep.engines.engine.Clock`.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._function: Any = None
        self._first = True
        self.done = 0
        self._reset()

    def _reset(self) -> None:
        self.steps = self.executions = self.rows = self.batch = 0
        self.wall = self.host = 0.0
        self._runs = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Start counting. The step function has been made."""
        self._function = self.model.train_function
        if isinstance(self._function, StepFunction):
            self.model.train_function = replace(
                self._function,
                check_program=self._counting(self._function.run, self._function.check_program),
            )

    def on_train_end(self, logs: Any = None) -> None:
        """Restore the step function of the model."""
        self.model.train_function = self._function

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Start the clock before the first batch is drawn."""
        if not self._runs:
            self._turn(-1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End training after enough steps and executions."""
        self.executions += 1
        if self._first and self._is_left_out():
            if logs:
                dict(logs)  # fetch the logs: waits for the devices
            self._reset()
        self._first = False
        if self.steps >= self._most and self.executions >= EXECUTIONS:
            self.model.stop_training = True
            self._stop()
        # Work of Keras at the end of an epoch, such as waiting for workers, is not timed.
        elif self.steps == self.params["steps"]:
            self._stop()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop the clock if the last step was not known in advance."""
        if self._runs:
            self._stop()

    def _is_left_out(self) -> bool:
        """Return whether the first execution is not timed, as training ends within the epoch.

        The work at the start of an epoch, such as shuffling all rows, then serves many more steps
        than those timed.
        """
        steps: int | None = self.params["steps"]
        return steps is not None and steps >= self.steps + max(self._most, EXECUTIONS * self.steps)

    def _stop(self) -> None:
        # Not by fetching the logs: a custom step may return none.
        jax.block_until_ready([variable.value for variable in self.model.variables])
        self._turn(1)

    def _turn(self, sign: int) -> None:
        self._runs = sign < 0
        self.wall += sign * time.perf_counter()
        self.host += sign * time.thread_time()

    def _counting(self, run: Any, check_program: Callable[[Any, Any, Any], Any] | None) -> Any:
        def count(program: Any, state: Any, placed: Any) -> Any:
            if check_program is not None:
                placed = check_program(program, state, placed)
            steps, rows = _steps_and_rows(placed, several=program is not run)
            self.done += steps
            self.steps += steps
            self.rows += steps * rows
            self.batch = max(self.batch, rows)
            return placed

        return count


def _steps_and_rows(placed: Any, *, several: bool) -> tuple[int, int]:
    """Return the number of steps in the argument of a program, and the rows of each.

    Args:
        placed: A batch, or several stacked batches.
        several: Whether `placed` is several batches.
    """
    dim = 1 if several else 0
    for leaf in jax.tree.leaves(placed, is_leaf=lambda leaf: isinstance(leaf, _WHOLE)):
        shape = leaf.padded.shape if isinstance(leaf, PaddedArray) else leaf.shape
        if len(shape) > dim:
            rows = leaf.rows if isinstance(leaf, PaddedArray) else shape[dim]
            return (shape[0] if several else 1), rows
    return 1, 0


_WHOLE = (PaddedArray, sparse.JAXSparse)
