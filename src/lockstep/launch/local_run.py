"""`lockstep run`: starts the processes of one machine, and supervises them to their end."""

import os
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lockstep.launch.guardian import Guard
from lockstep.launch.progress_watch import ProgressWatch
from lockstep.launch.rank import Failure, Output, RankProcess, cause_of, print_line
from lockstep.processes.shares import place_of_each

_POLL = 0.05
_STOP_WITHIN = 120.0
"""Seconds that processes have to save and stop after a signal, as long as Slurm gives them."""
_OTHERS_END_WITHIN = 10.0
"""Seconds that processes have to end by themselves after one has failed."""
_STILL_RUNNING = 10.0
_STACKS_WITHIN = 1.0

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_here(
    command: list[str],
    devices: list[dict[str, str]],
    restarts: int = 0,
    hang_timeout: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Run a command in several processes, and again after a failure.

    Args:
        command: The program and its arguments.
        devices: For each process, the variables that give it its devices.
        restarts: How many times all processes may start again.
        hang_timeout: Seconds that a process may stand still in a call of a model, `None` for ever.
        environ: The environment, `os.environ` if left out.

    Returns:
        The exit status: 0, that of the process that failed first, or 128 and the number of the
        signal that stopped the run.
    """
    given = dict(os.environ if environ is None else environ)
    given.pop("LOCKSTEP_JOINED", None)
    with tempfile.TemporaryDirectory(prefix="lockstep-run-") as folder, _stop_signals() as stops:
        guard = Guard(_STOP_WITHIN, folder)

        def start(attempt: int) -> _Attempt:
            variables = [
                {**given, **mine, **place, "PYTHONUNBUFFERED": "1"}
                for mine, place in zip(devices, place_of_each(len(devices)), strict=True)
            ]
            return _Attempt(command, variables, Path(folder) / str(attempt), guard)

        try:
            return _run_with_restarts(start, command[1], restarts, hang_timeout, stops)
        finally:
            guard.close()


class _Attempt:
    """The processes of one attempt.

    Attributes:
        ranks: The processes, by their number.
    """

    def __init__(
        self, command: list[str], variables: list[dict[str, str]], folder: Path, guard: Guard
    ) -> None:
        folder.mkdir()
        self._guard = guard
        self._pipes = selectors.DefaultSelector()
        self.ranks: list[RankProcess] = []
        for number, mine in enumerate(variables):
            # The first process writes to the terminal, as without a launcher.
            out = Output(number, sys.stdout) if number else None
            error = Output(number, sys.stderr)
            rank = RankProcess(number, command, mine, folder / f"{number}.json", out, error)
            guard.add(rank.process.pid)
            self.ranks.append(rank)
            for pipe, sink in rank.sinks.items():
                self._pipes.register(pipe, selectors.EVENT_READ, sink)

    def all_ended_well(self) -> bool:
        """Return whether every process has exited with 0."""
        return all(rank.code == 0 for rank in self.ranks)

    def failures(self) -> dict[int, Failure]:
        """Return how processes have failed so far, by their number."""
        found = {rank.number: rank.failure() for rank in self.ranks}
        return {number: failure for number, failure in found.items() if failure is not None}

    def pass_on(self, seconds: float) -> None:
        """Wait this long for output of the processes, and show what is there."""
        for key, _event in self._pipes.select(seconds):
            data = os.read(key.fd, 1 << 16)
            if data:
                key.data.write(data)
            else:
                self._pipes.unregister(key.fileobj)

    def close(self) -> None:
        """Show the rest of the output, and reap the processes. All have ended."""
        # A worker of a process may hold a pipe open.
        while self._pipes.get_map() and self._pipes.select(0.0):
            self.pass_on(0.0)
        self._pipes.close()
        for rank in self.ranks:
            rank.process.wait()
            self._guard.remove(rank.process.pid)
            for pipe, sink in rank.sinks.items():
                sink.close()
                pipe.close()


def _run_with_restarts(
    start: Callable[[int], _Attempt],
    script: str,
    restarts: int,
    hang_timeout: float | None,
    stops: list[int],
) -> int:
    """Run processes until they end well, a signal stops them, or no restart is left."""
    attempt = 0
    while True:
        started = start(attempt)
        cause = _supervise(started, hang_timeout, stops)
        if stops:
            return 0 if started.all_ended_well() else 128 + stops[0]
        if cause is None:
            _note_script_without_distribute(started, script)
            return 0
        _tell(cause, started)
        if attempt == restarts:
            return cause.exit_status
        attempt += 1
        print_line(f"restart {attempt} of {restarts}")


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect the signals that ask the run to stop, instead of ending Python."""
    asked: list[int] = []
    before = {number: signal.getsignal(number) for number in _STOPPING}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda received, _: asked.append(received))
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _supervise(started: _Attempt, hang_timeout: float | None, stops: list[int]) -> Failure | None:
    """Wait until all processes have ended; return the failure that caused the others."""
    watch = ProgressWatch(started.ranks, hang_timeout)
    try:
        _wait(started, watch, stops)
    finally:
        failures = started.failures()
        for rank in started.ranks:
            if failures or stops or not rank.has_ended():
                rank.kill()
        started.close()
    if watch.hanging is not None:
        return watch.hanging
    return cause_of([*failures.values()]) if failures else None


def _wait(started: _Attempt, watch: ProgressWatch, stops: list[int]) -> None:
    told = heard = 0
    first_failed = asked_at = 0.0
    still_running = False
    while not all(rank.has_ended() for rank in started.ranks):
        started.pass_on(_POLL)
        now = time.monotonic()
        if not first_failed and started.failures():
            first_failed = now
        told, heard = heard, len(stops)
        if heard > told:
            if heard > 1:
                return
            asked_at = now
            for rank in started.ranks:
                rank.send(signal.SIGTERM)
            print_line("asked the script to save and stop; press Ctrl-C again to kill it")
        if first_failed and now > first_failed + _OTHERS_END_WITHIN:
            return
        if asked_at and now > asked_at + _STOP_WITHIN:
            print_line(f"still running {_STOP_WITHIN:.0f} s after the signal: killed")
            return
        if asked_at and not still_running and now > asked_at + _STILL_RUNNING:
            still_running = True
            print_line("still running; a script without lockstep.Checkpoint may not stop by itself")
        if not first_failed and not asked_at and watch.look():
            while time.monotonic() < now + _STACKS_WITHIN:
                started.pass_on(_POLL)
            return


_ASKS_FOR_GROUP = "Default process group has not been initialized"
"""What PyTorch raises for a `DistributedSampler`, for example, in a script under lockstep."""


def _tell(cause: Failure, started: _Attempt) -> None:
    many = f" of {len(started.ranks)} failed first" if len(started.ranks) > 1 else " failed"
    print_line(f"process {cause.rank}{many}: {cause}")
    lines = started.ranks[cause.rank].last_lines()
    if any(_ASKS_FOR_GROUP in line for line in (str(cause), *lines)):
        print_line(
            "a DistributedSampler needs a process group: remove the sampler. Each process reads "
            "all rows, in batches of the global size, and DataLoader(..., shuffle=True) shuffles"
        )
    if cause.rank and lines:  # those of process 0 have just been printed plain
        print_line("its last lines:")
        for line in lines:
            sys.stderr.write(f"    {line}\n")
        sys.stderr.flush()


def _note_script_without_distribute(started: _Attempt, script: str) -> None:
    """Print a note if several processes have trained alone."""
    alone = not any(rank.status().distributed for rank in started.ranks)
    if alone and len(started.ranks) > 1:
        print_line(
            f"note: {Path(script).name} never called lockstep.distribute, so "
            f"{len(started.ranks)} processes did the same work independently"
        )
