"""`lockstep run` on this machine: the processes, their pipes and their guardian."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from lockstep.launch import status
from lockstep.launch.guardian import Guard
from lockstep.launch.rank import Output, Rank
from lockstep.launch.shares import place_of_each
from lockstep.launch.status import Status
from lockstep.launch.supervision import (
    STOP_WITHIN,
    Group,
    HangTimeout,
    run_with_restarts,
    stop_signals,
)


class RankProcess(Rank):
    """One process of the run, on this machine.

    Args:
        number: Its number.
        command: The program and its arguments.
        variables: Its environment.
        file: The file for its status.
        out: Takes its output; `None` for the output of this process.
        error: Takes its errors; `None` for those of this process.
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
        out: Output | None,
        error: Output | None,
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
            stderr=None if error is None else subprocess.PIPE,
            start_new_session=True,
        )
        self.sinks: dict[IO[bytes], Output] = {}
        for pipe, sink in ((self.process.stdout, out), (self.process.stderr, error)):
            if pipe is not None and sink is not None:
                os.set_blocking(pipe.fileno(), False)
                self.sinks[pipe] = sink

    @property
    def shown(self) -> Sequence[Output]:
        """What the launcher shows of its output, its errors last."""
        return [*self.sinks.values()]

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

    def close(self) -> None:
        """Pass on what is left, which a worker of a process may hold open; read no more."""
        while self._pipes.get_map() and self._pipes.select(0.0):
            self.pass_on(0.0)
        self._pipes.close()


def run_here(
    command: list[str],
    devices: list[dict[str, str]],
    restarts: int = 0,
    limits: HangTimeout | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Run a command in several processes, and again after a failure.

    Args:
        command: The program and its arguments.
        devices: For each process, the variables that give it its devices.
        restarts: How many times all processes may start again.
        limits: How long a process may stand still, `None` for ever.
        environ: The environment, `os.environ` if left out.

    Returns:
        The exit status: 0, that of the process that failed first, or 128 and the number of the
        signal that stopped the run.
    """
    given = dict(os.environ if environ is None else environ)
    given.pop("LOCKSTEP_JOINED", None)
    with tempfile.TemporaryDirectory(prefix="lockstep-run-") as folder, stop_signals() as stops:
        guard = Guard(STOP_WITHIN, folder)

        def start(attempt: int) -> Group:
            variables = [
                {**given, **mine, **place, "PYTHONUNBUFFERED": "1"}
                for mine, place in zip(devices, place_of_each(len(devices)), strict=True)
            ]
            return _LocalGroup(command, variables, Path(folder) / str(attempt), guard)

        try:
            return run_with_restarts(start, command[1], restarts, limits, stops).status
        finally:
            guard.close()


class _LocalGroup(Group):
    """The processes of one attempt, on this machine."""

    def __init__(
        self, command: list[str], variables: list[dict[str, str]], folder: Path, guard: Guard
    ) -> None:
        folder.mkdir()
        self._guard = guard
        self._pipes = Pipes()
        self.ranks: list[RankProcess] = []
        for number, mine in enumerate(variables):
            # The first process writes to the terminal, as without a launcher.
            out = Output(number, sys.stdout) if number else None
            error = Output(number, sys.stderr)
            rank = RankProcess(number, command, mine, folder / f"{number}.json", out, error)
            guard.add(rank.process.pid)
            self.ranks.append(rank)
            self._pipes.add(rank)

    def pass_on(self, seconds: float) -> None:
        """Wait this long for output of the processes, and show what is there."""
        self._pipes.pass_on(seconds)

    def close(self) -> None:
        """Show the rest of the output, and reap the processes."""
        self._pipes.close()
        for rank in self.ranks:
            rank.process.wait()
            self._guard.remove(rank.process.pid)
            for pipe, sink in rank.sinks.items():
                sink.close()
                pipe.close()
