"""A process of a run on this machine, and the pipes that it writes to."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from lockstep.launch import status
from lockstep.launch.output import Output
from lockstep.launch.rank import Rank
from lockstep.launch.status import Status


class Sink(Protocol):
    """Takes what a process writes."""

    def write(self, data: bytes) -> None:
        """Take some bytes."""

    def close(self) -> None:
        """Take the end of the output."""


class RankProcess(Rank):
    """One process of the run, on this machine.

    Args:
        number: Its number.
        command: The program and its arguments.
        variables: Its environment.
        file: The file for its status.
        out: Takes its output; `None` for the output of the launcher.
        error: Takes its errors.
        folder: Its working directory; `None` for that of the launcher.

    Attributes:
        process: The process.
    """

    def __init__(
        self,
        number: int,
        command: list[str],
        variables: Mapping[str, str],
        file: Path,
        out: Sink | None,
        error: Sink,
        folder: str | None = None,
    ) -> None:
        super().__init__(number)
        self._file = file
        self._seen = Status()
        # A session of its own: the terminal's Ctrl-C reaches the launcher alone.
        self.process = subprocess.Popen(
            command,
            env={**variables, status.STATUS: str(file)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=None if out is None else subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.sinks: dict[IO[bytes], Sink] = {}
        for pipe, sink in ((self.process.stdout, out), (self.process.stderr, error)):
            if pipe is not None and sink is not None:
                os.set_blocking(pipe.fileno(), False)
                self.sinks[pipe] = sink

    @property
    def shown(self) -> Sequence[Output]:
        """What the launcher shows of its output, its errors last."""
        return [sink for sink in self.sinks.values() if isinstance(sink, Output)]

    @property
    def reports(self) -> bool:
        """Whether it has imported lockstep."""
        return self._file.exists()

    def status(self) -> Status:
        """Return what the process last said about itself."""
        self._seen = status.read(self._file) or self._seen
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


class Pipes:
    """The pipes of processes on this machine."""

    def __init__(self) -> None:
        self._pipes = selectors.DefaultSelector()

    def add(self, rank: RankProcess) -> None:
        """Read what this process writes."""
        for pipe, sink in rank.sinks.items():
            self._pipes.register(pipe, selectors.EVENT_READ, sink)

    def pass_on(self, seconds: float) -> None:
        """Wait this long for output, and pass on what is there."""
        for key, _event in self._pipes.select(seconds):
            data = os.read(key.fd, 1 << 16)
            if data:
                key.data.write(data)
            else:
                self._pipes.unregister(key.fileobj)

    def has_more(self) -> bool:
        """Return whether there is something to read now."""
        return bool(self._pipes.get_map() and self._pipes.select(0.0))

    def drain(self) -> None:
        """Pass on what is left, which a worker of a process may hold open."""
        while self.has_more():
            self.pass_on(0.0)

    def close(self) -> None:
        """Read no more."""
        self._pipes.close()
