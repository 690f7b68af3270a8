"""Times the steps of a `fit`, on any backend."""

import time
from typing import Any

from lockstep.training.callbacks import StepTimer

EXECUTIONS = 4
"""The smallest number of timed executions. Batches are drawn while the devices run the execution
before."""


class StepClock(StepTimer):
    """Time the steps of an epoch, and end training after `most` steps.

    Steps and rows are counted where a step runs. Keras numbers the steps that an execution has
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

    def counting(self, function: Any) -> Any:
        """Return the step function of the model, made to call `count` for each batch."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until every device has done its steps."""
        raise NotImplementedError

    def host_time(self) -> float:
        """Return the processor time that this process has taken to start steps, in seconds."""
        return time.thread_time()

    def count(self, steps: int, rows: int, largest: int) -> None:
        """Count the steps of an execution.

        Args:
            steps: The number of steps.
            rows: The rows of all of them.
            largest: The rows of the largest one.
        """
        self.done += steps
        self.steps += steps
        self.rows += rows
        self.batch = max(self.batch, largest)

    def on_train_begin(self, logs: Any = None) -> None:
        """Start counting. The step function has been made."""
        self._function = self.model.train_function
        self.model.train_function = self.counting(self._function)

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
        self.wait()
        self._turn(1)

    def _turn(self, sign: int) -> None:
        self._runs = sign < 0
        self.wall += sign * time.perf_counter()
        self.host += sign * self.host_time()
