"""One process of a run as its launcher sees it: its output, and how it has failed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TextIO

import click

from lockstep.core.status import STATUS, Status, read

_LAST_LINES = 20
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_red")
_LIKELY_VICTIM = 1.0
"""Seconds by which the failure of a likely victim has to be earlier to count as the cause."""


class Output:
    """The output of one process.

    Args:
        rank: The number of the process. The output of process 0 is passed on as it comes.
        stream: Where to write it.

    Attributes:
        last: The last lines.
    """

    def __init__(self, rank: int, stream: TextIO) -> None:
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        self._stream = stream
        self._begun = b""
        colour = _COLOURS[(rank - 1) % len(_COLOURS)]
        self._prefix = click.style(f"[{rank}] ", fg=colour) if rank else None

    def write(self, data: bytes) -> None:
        """Pass on what the process has written."""
        if self._prefix is None:
            self._stream.buffer.write(data)
            self._stream.flush()
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            self._write_line(line)

    def close(self) -> None:
        """Pass on a last line without an end."""
        if self._begun:
            self._write_line(self._begun)
            self._begun = b""

    def _write_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]  # a progress bar
        self.last.append(text)
        if self._prefix is not None:
            click.echo(self._prefix + text, file=self._stream)


def print_line(text: str) -> None:
    """Print a line of the launcher itself, to stderr."""
    click.secho(f"lockstep run: {text}", file=sys.stderr, bold=True)


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
            memory = ", which Linux sends when memory runs out" if name == "SIGKILL" else ""
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


class RankProcess:
    """One process of the run.

    Args:
        number: Its number.
        command: The program and its arguments.
        variables: Its environment.
        file: The file for its status.
        out: Takes its output; `None` for the output of this process.
        error: Takes its errors.

    Attributes:
        number: Its number.
        process: The process.
        sinks: What takes the output of each of its pipes, its errors last.
        code: Its exit status, `None` while it runs.
        ended_at: The time of its end, in seconds since 1970.
        killed: Whether the launcher has killed it.
    """

    def __init__(
        self,
        number: int,
        command: list[str],
        variables: Mapping[str, str],
        file: Path,
        out: Output | None,
        error: Output,
    ) -> None:
        self.number = number
        self.code: int | None = None
        self.ended_at = 0.0
        self.killed = False
        self._file = file
        self._seen = Status()
        # A session of its own: the terminal's Ctrl-C reaches the launcher alone.
        self.process = subprocess.Popen(
            command,
            env={**variables, STATUS: str(file)},
            stdin=subprocess.DEVNULL,
            stdout=None if out is None else subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.sinks: dict[IO[bytes], Output] = {}
        for pipe, sink in ((self.process.stdout, out), (self.process.stderr, error)):
            if pipe is not None and sink is not None:
                os.set_blocking(pipe.fileno(), False)
                self.sinks[pipe] = sink

    @property
    def reports(self) -> bool:
        """Whether it has imported lockstep. Then it writes its stacks on `DUMP_STACKS`."""
        return self._file.exists()

    def status(self) -> Status:
        """Return what the process last said about itself."""
        self._seen = read(self._file) or self._seen
        return self._seen

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

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process; false where unknown."""
        try:
            text = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] in ("T", "t")

    def send(self, number: int) -> None:
        """Send a signal to the process, and not to the workers that it has started."""
        if not self.has_ended():
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End the process and all that it has started."""
        self.killed |= not self.has_ended()
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def last_lines(self) -> list[str]:
        """Return the last lines of its errors, or else of its output."""
        last = [[*each.last] for each in self.sinks.values()]
        return last[-1] or [line for each in last for line in each]

    def failure(self) -> Failure | None:
        """Return how the process has failed, `None` if it has not, or was killed here."""
        self.has_ended()
        found = self.status()
        if found.failed_at is not None:
            return Failure(self.number, self.code, found.failed_at, found)
        if not self.code or self.killed:
            return None
        return Failure(self.number, self.code, self.ended_at, found)
