"""What a checkpoint needs of a running `fit`, and what `fit` tells it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Snapshot:
    """The variables of a model between two steps.

    Attributes:
        variables: How many of the arrays are variables; the rest are the logs.
        arrays: The name, type and shape of each.
        values: Their values, fetched to the host one at a time, in the same order; to be
            gone through once, by any thread, while training goes on.
    """

    variables: int
    arrays: list[tuple[str, str, tuple[int, ...]]]
    values: Iterator[np.ndarray]


class Run(Protocol):
    """One call of `fit`, between two of its steps.

    Attributes:
        model: The model, of which nothing is touched.
        devices: The names of its devices.
        epochs: Where the run ends.
    """

    model: Any
    devices: tuple[str, ...]
    epochs: int

    def facts(self) -> dict[str, Any]:
        """What has to be the same for a run to go on: model, optimizer, data."""
        ...

    def variables(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """The name, type and shape of every variable, in the order of a snapshot."""
        ...

    def snapshot(self, logs: dict[str, Any]) -> Snapshot:
        """A copy of every variable, for which training waits no longer than it takes to order.

        The logs of the last step come after the variables.
        """
        ...

    def state(self, step: int) -> dict[str, Any]:
        """Whatever else the run has changed, after so many steps of its epoch; 0 between two.

        Raises:
            CheckpointError: If a callback has a state that cannot be written down.
        """
        ...

    def is_told_to_leave(self) -> bool:
        """Whether one of several processes was sent SIGTERM, and all are at the agreed step.

        Every process asks once after each step. A process that is alone is never told here.
        """
        ...

    def wait_for_others(self) -> None:
        """Return when every process has come here; at once where there is one."""
        ...

    def save_model(self, path: str, values: list[np.ndarray] | None) -> None:
        """Write a plain `.keras` file, of other values than the model has if some are given."""
        ...

    def restore(self, epoch: int, step: int, values: list[np.ndarray], state: Any) -> list[str]:
        """Let `fit` go on where `snapshot` and `state` were taken; what a user has to know.

        Args:
            epoch: The epoch to go on in, or to begin with.
            step: How many steps of it are done, 0 where it is yet to begin.
            values: The variables, in the order of the snapshot.
            state: What `state` gave, with the logs of the last step beside it.
        """
        ...


class Recorder:
    """A callback that `fit` tells more than it tells others.

    Attributes:
        beside: The classes of the other callbacks, by name.
        stopped_by: That of the one that has set `stop_training`, `None` while none has.
    """

    beside: tuple[str, ...] = ()
    stopped_by: str | None = None

    def around(self, model: Any, *, writes: bool, alone: bool) -> AbstractContextManager[object]:
        """Lasts as long as `fit` does.

        Args:
            model: The model.
            writes: Whether this process is the one that writes.
            alone: Whether it is the only one.
        """
        raise NotImplementedError

    def goes_on_from(self) -> str | None:
        """The run to go on with, `None` where there is none."""
        raise NotImplementedError

    def begin(self, run: Run, epoch: int) -> int:
        """All callbacks know that training begins; the epoch to begin with, instead of `epoch`."""
        raise NotImplementedError

    def batch_ended(self, step: int, logs: dict[str, Any]) -> None:
        """So many steps of the epoch are done, and all callbacks have been told.

        Looking at a value of `logs` waits for the device.
        """
        raise NotImplementedError

    def failed(self, error: Exception, between_steps: bool) -> None:
        """The `fit` is about to end by an error.

        Args:
            error: What was raised.
            between_steps: Whether state and position are those after the last step that ended.
        """
        raise NotImplementedError

    def epoch_ended(self, epoch: int, logs: dict[str, Any]) -> None:
        """An epoch is done, and all callbacks have been told."""
        raise NotImplementedError
