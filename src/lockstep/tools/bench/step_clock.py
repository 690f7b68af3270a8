"""Times the steps of a `fit`, on any backend."""

import time
from typing import Any

import keras

from lockstep.training.callbacks import StepTimer

EXECUTIONS = 4
"""The smallest number of timed executions. Batches are drawn while the devices run the execution
before."""


class StepClock(StepTimer):
    """Time the steps of an epoch, and end training after about `most` steps.

    Lockstep's loops recognize this class and run as without it, except that they call it after
    every step or execution. It waits for the devices only before the first timed step and after the
    last one.

    Args:
        most: The limit. A round has at least `EXECUTIONS` executions, and one before them that is
            not timed.
        batches: The number of batches of an epoch, `None` if it is not known.

    Attributes:
        done: Number of all steps, timed or not.
        steps: Number of timed steps.
        executions: Number of executions of the timed steps.
        wall: Seconds from the start of the first timed step to the end of the last.
        host: Processor time of the main thread in that time, in seconds.
    """

    def __init__(self, most: int, batches: int | None = None) -> None:
        super().__init__()
        self._most, self._batches = most, batches
        self._first = True
        self.done = 0
        self._reset()

    def _reset(self) -> None:
        self.steps = self.executions = 0
        self.wall = self.host = 0.0
        self._runs = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Start the clock before the first batch is drawn."""
        if not self._runs:
            self._turn(-1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End training after enough steps and executions."""
        total: int | None = self.params["steps"] or self._batches
        # Keras numbers the steps that an execution has room for. The data may not fill all of them.
        done = batch + 1 if total is None else min(batch + 1, total)
        self.steps += done - self.done
        self.done = done
        self.executions += 1
        if self._first and self._is_left_out(total):
            self._wait()
            self._reset()
        self._first = False
        if self.steps >= self._most and self.executions >= EXECUTIONS:
            self.model.stop_training = True
            self._stop()
        # Work of Keras at the end of an epoch, such as waiting for workers, is not timed.
        elif done == total:
            self._stop()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop the clock if the last step was not known in advance."""
        if self._runs:
            self._stop()

    def _is_left_out(self, total: int | None) -> bool:
        """Return whether the first execution is not timed, as training ends within the epoch.

        The work at the start of an epoch, such as shuffling all rows, then serves many more steps
        than those timed.
        """
        return total is not None and total >= self.steps + max(self._most, EXECUTIONS * self.steps)

    def _wait(self) -> None:
        """Wait until the devices have done their steps, by the value of the last weight."""
        # Not by fetching the logs: a custom step may return none.
        for weight in self.model.trainable_variables[-1:]:
            keras.ops.convert_to_numpy(weight)

    def _stop(self) -> None:
        self._wait()
        self._turn(1)

    def _turn(self, sign: int) -> None:
        self._runs = sign < 0
        self.wall += sign * time.perf_counter()
        self.host += sign * time.thread_time()
