"""The processes that train one model, as their engine connects them."""

from typing import Any, Protocol

import numpy as np


class ProcessGroup(Protocol):
    """The processes of one training, and a store of texts that all of them see.

    A lost connection raises `RuntimeError`.
    """

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    def put(self, key: str, text: str) -> None:
        """Store a text, and replace an earlier one."""
        ...

    def get(self, key: str) -> str | None:
        """Return the current text of a key, or `None`."""
        ...

    def wait(self, key: str, milliseconds: int) -> str | None:
        """Return the text of a key when it is there, `None` if it is not there in time."""
        ...

    def delete(self, folder: str) -> None:
        """Delete all keys that begin with `folder/`; every process calls this."""
        ...

    def broadcast(self, values: list[np.ndarray]) -> list[np.ndarray]:
        """Return the bytes of the first process, in every process, given as many of this one."""
        ...

    def gather(self, mine: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
        """Return the bytes of every process, given those of this one, and the size of each."""
        ...

    def share_random_state(self) -> None:
        """Give every process the random state of the first one that the framework has, if any."""
        ...

    def local(self, value: Any) -> Any:
        """Return this process's copy of an array of all processes; any other value as it is.

        Raises:
            ProcessesDisagree: If no process has the array whole.
        """
        ...

    def rows_here(self, value: Any) -> Any:
        """Return the rows that this process has of an array of all processes; others as they are.

        Raises:
            UnusableData: If the rows of the array are not those of one process after another.
        """
        ...

    def has_part(self, variable: Any) -> bool:
        """Return whether no process has the value of this variable whole."""
        ...

    def to_host(self, value: Any) -> np.ndarray:
        """Return this process's copy as a NumPy array."""
        ...

    @property
    def records_sigterm(self) -> bool:
        """Whether the framework records SIGTERM, so that Python gets none."""
        ...

    def agreed_to_stop(self, steps: int, asked: bool) -> bool:
        """Return whether a process got SIGTERM, and all agreed to stop at this number of steps.

        Args:
            steps: How often every process has called this. All meet between two calls.
            asked: Whether this process has recorded the signal. Not used if the framework does.
        """
        ...


class _OneProcess:
    """A process on its own, which exchanges nothing."""

    rank, size = 0, 1

    def local(self, value: Any) -> Any:
        return value

    def rows_here(self, value: Any) -> Any:
        return value

    def to_host(self, value: Any) -> np.ndarray:
        return np.asarray(value)


_current: list[Any] = [_OneProcess()]


def use(group: ProcessGroup) -> None:
    """Let all agreements of this process go over `group`."""
    _current[:] = [group]


def current() -> ProcessGroup:
    """Return the group of this process; at first, the process alone."""
    group: ProcessGroup = _current[0]
    return group
