"""One process of a run as its launcher sees it, and how it has failed."""

import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.launch.output import Output
from lockstep.launch.status import Status

_LIKELY_VICTIM = 1.0
"""Seconds by which the failure of a likely victim has to be earlier to count as the cause."""


@dataclass(frozen=True)
class Failure:
    """The failure of one process.

    Attributes:
        rank: The number of the process.
        code: Its exit status; the negative number of the signal that ended it; `None` while it
            still runs after an uncaught exception.
        at: The time of the failure, in seconds since 1970.
        status: What the process had said about itself.
    """

    rank: int
    code: int | None
    at: float
    status: Status = field(default_factory=Status)

    @property
    def is_likely_victim(self) -> bool:
        """Whether the process has probably failed because of another one."""
        words = self.status.failure or ""
        # JAX ends a process by SIGABRT if it loses the connection to process 0.
        return (
            self.status.failed_by not in (None, self.rank)
            or self.code == -signal.SIGABRT
            or any(each in words for each in ("Gloo", "UNAVAILABLE", "oordination service", "NCCL"))
        )

    @property
    def exit_status(self) -> int:
        """The status for the launcher to exit with, as a shell gives it."""
        code = 1 if self.code is None else self.code
        return code if code > 0 else 128 - code

    def __str__(self) -> str:
        """Return how the process ended, in words."""
        if self.code is not None and self.code < 0:
            name = signal.Signals(-self.code).name
            memory = ", as Linux does when memory runs out" if name == "SIGKILL" else ""
            return f"ended by {name}{memory}"
        if self.status.failure is not None:
            return self.status.failure
        return f"exit status {self.code}"


def cause_of(failures: list[Failure]) -> Failure:
    """Return the failure that came first and is no consequence of another one.

    Example:
        >>> cause_of([Failure(0, -6, at=10.0), Failure(1, -9, at=10.1)]).rank
        1
    """

    def order(failure: Failure) -> float:
        named = failure.status.failed_by
        if named != failure.rank and any(each.rank == named for each in failures):
            return float("inf")
        return failure.at + (_LIKELY_VICTIM if failure.is_likely_victim else 0.0)

    return min(failures, key=order)


class Rank(ABC):
    """One process of the run, on this machine or another one.

    Attributes:
        number: Its number.
        code: Its exit status, `None` while it runs.
        ended_at: The time of its end, in seconds since 1970.
        killed: Whether the launcher has killed it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.code: int | None = None
        self.ended_at = 0.0
        self.killed = False

    @property
    @abstractmethod
    def shown(self) -> Sequence[Output]:
        """What the launcher shows of its output, its errors last."""

    @property
    @abstractmethod
    def reports(self) -> bool:
        """Whether it has imported lockstep. Then it writes its stacks on `DUMP_STACKS`."""

    @abstractmethod
    def status(self) -> Status:
        """Return what the process last said about itself."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Return whether the process has ended."""

    @abstractmethod
    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process, as SIGSTOP does."""

    @abstractmethod
    def send(self, number: int) -> None:
        """Send a signal to the process, and not to the workers that it has started."""

    @abstractmethod
    def kill(self) -> None:
        """End the process and all that it has started."""

    def last_lines(self) -> list[str]:
        """Return the last lines of its errors, or else of its output."""
        *_, errors = self.shown
        return [*errors.last] or [line for each in self.shown for line in each.last]

    def failure(self) -> Failure | None:
        """Return how the process has failed, `None` if it has not, or was killed here."""
        self.has_ended()
        found = self.status()
        if found.failed_at is not None:
            return Failure(self.number, self.code, found.failed_at, found)
        if not self.code or self.killed:
            return None
        return Failure(self.number, self.code, self.ended_at, found)
