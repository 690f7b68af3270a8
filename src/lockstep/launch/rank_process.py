"""One process of `lockstep run`, and how it has failed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from lockstep.launch import status
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


class Rank:
    """One process of the run.

    Attributes:
        number: Its number.
        process: The process.
        code: Its exit status, `None` while it runs.
        killed: Whether the launcher has killed it.
    """

    def __init__(self, number: int, command: list[str], variables: dict[str, str], file: Path):
        self.number = number
        self.file = file
        self.code: int | None = None
        self.ended_at = 0.0
        self.killed = False
        self._seen = Status()
        # A session of its own: the terminal's Ctrl-C reaches the launcher alone.
        self.process = subprocess.Popen(
            command,
            env={**variables, status.STATUS: str(file)},
            stdin=subprocess.DEVNULL,
            # The first process writes to the terminal, as without a launcher.
            stdout=subprocess.PIPE if number else None,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.outputs: dict[IO[bytes], Output] = {}
        for pipe, stream in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self.outputs[pipe] = Output(number, stream)

    def status(self) -> Status:
        """Return what the process last said about itself."""
        self._seen = status.read(self.file) or self._seen
        return self._seen

    def last_lines(self) -> list[str]:
        """Return the last lines of its errors, or else of its output."""
        *_, errors = self.outputs.values()
        return [*errors.last] or [line for each in self.outputs.values() for line in each.last]

    def has_ended(self) -> bool:
        """Return whether the process has ended. It is not reaped, so nothing else gets its id."""
        if self.code is None:
            self.code = self._exit_status()
            self.ended_at = time.time()
        return self.code is not None

    def _exit_status(self) -> int | None:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self.process.poll()
        found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def send(self, number: int) -> None:
        """Send a signal to the process, and not to the workers that it has started."""
        if not self.has_ended():
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End the process and all that it has started."""
        self.killed |= not self.has_ended()
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def failure(self) -> Failure | None:
        """Return how the process has failed, `None` if it has not, or was killed here."""
        self.has_ended()
        found = self.status()
        if found.failed_at is not None:
            return Failure(self.number, self.code, found.failed_at, found)
        if not self.code or self.killed:
            return None
        return Failure(self.number, self.code, self.ended_at, found)
