"""Times the steps of a fit."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import keras
from jax.experimental import sparse

from lockstep.engines.jax.on_devices.sharded import Sharded
from lockstep.engines.jax.steps.step import StepFunction

EXECUTIONS = 4
"""At least so many: batches are drawn while the devices run the execution before."""


class Clock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Times the steps of an epoch, and ends training after so many.

    Steps and rows are counted where a program is run. What Keras numbers are steps that an
    execution has room for, of which the data may not fill all.

    Lockstep's loops know this class, and go on as they would without it, but for coming back to
    it after every step or execution. It waits for the devices before the first step that is
    timed and after the last one only.

    Its attributes are those of `lockstep.engines.engine.Clock`.
    """

    def __init__(self, most: int, *, settle: bool) -> None:
        """`settle`: go on until it is found out how many steps go into one program."""
        super().__init__()
        self._most, self._settle = most, settle
        self._function: Any = None
        self._first = True
        self.done = 0
        self._reset()

    def _reset(self) -> None:
        self.steps = self.executions = self.rows = self.batch = 0
        self.wall = self.host = 0.0
        self._runs = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Count from here on; the step function has been made."""
        self._function = self.model.train_function
        if isinstance(self._function, StepFunction):
            self.model.train_function = replace(
                self._function, look=self._counting(self._function.run, self._function.look)
            )

    def on_train_end(self, logs: Any = None) -> None:
        """Give the model its own step function back."""
        self.model.train_function = self._function

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Start before the first batch is drawn."""
        if not self._runs:
            self._turn(-1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End training where that was enough."""
        self.executions += 1
        if self._first and self._is_left_out():
            if logs:
                dict(logs)  # their numbers: the devices have done it
            self._reset()
        self._first = False
        enough = self.steps >= self._most and self.executions >= EXECUTIONS
        if enough and not (self._settle and self._is_open()):
            self.model.stop_training = True
            self._stop()
        # What Keras does at the end of an epoch, waiting for workers say, is no step.
        elif self.steps == self.params["steps"]:
            self._stop()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop where nobody knew that a step would be the last."""
        if self._runs:
            self._stop()

    def _is_left_out(self) -> bool:
        """Whether the first execution is not timed, because training ends within the epoch.

        What an epoch begins with, to shuffle all rows say, is of many more steps then.
        """
        steps: int | None = self.params["steps"]
        return steps is not None and steps >= self.steps + max(self._most, EXECUTIONS * self.steps)

    def _stop(self) -> None:
        # Not by looking at the logs: a step of the user's own may give none.
        jax.block_until_ready([variable.value for variable in self.model.variables])
        self._turn(1)

    def _turn(self, sign: int) -> None:
        self._runs = sign < 0
        self.wall += sign * time.perf_counter()
        self.host += sign * time.thread_time()

    def _is_open(self) -> bool:
        pace = self._function.pace if isinstance(self._function, StepFunction) else None
        return pace is not None and pace.times is None

    def _counting(self, run: Any, look: Callable[[Any, Any, Any], Any] | None) -> Any:
        def count(program: Any, state: Any, placed: Any) -> Any:
            if look is not None:
                placed = look(program, state, placed)
            steps, rows = _steps_and_rows(placed, several=program is not run)
            self.done += steps
            self.steps += steps
            self.rows += steps * rows
            self.batch = max(self.batch, rows)
            return placed

        return count


def _steps_and_rows(placed: Any, *, several: bool) -> tuple[int, int]:
    """How many steps there are in what a program is given, and how many rows in each.

    Args:
        placed: A batch, or several that are stacked.
        several: Whether it is several.
    """
    dim = 1 if several else 0
    for leaf in jax.tree.leaves(placed, is_leaf=lambda leaf: isinstance(leaf, _WHOLE)):
        shape = leaf.padded.shape if isinstance(leaf, Sharded) else leaf.shape
        if len(shape) > dim:
            rows = leaf.rows if isinstance(leaf, Sharded) else shape[dim]
            return (shape[0] if several else 1), rows
    return 1, 0


_WHOLE = (Sharded, sparse.JAXSparse)
