"""`lockstep run`: the processes of a script on this machine, from their start to their end."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lockstep.launch import guardian
from lockstep.launch.output import say
from lockstep.launch.patience import Patience, Watch
from lockstep.launch.rank_process import Failure, Rank, cause_of
from lockstep.launch.shares import place_of_each

_POLL = 0.05
OTHERS_END_WITHIN = 10.0
"""Seconds that processes have to end by themselves after one of them has failed."""
STOP_WITHIN = 120.0
"""Seconds that processes have to save and stop after a signal, as long as Slurm gives them."""
_STILL_RUNNING = 10.0

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_here(
    command: list[str],
    devices: list[dict[str, str]],
    restarts: int = 0,
    patience: Patience | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Run a command in several processes, and again after a failure.

    Args:
        command: The program and its arguments.
        devices: For each process, the variables that give it its devices.
        restarts: How many times all processes may start again.
        patience: How long a process may stand still, `None` for ever.
        environ: The environment, `os.environ` if left out.

    Returns:
        The exit status: 0, that of the process that failed first, or 128 and the number of the
        signal that stopped the run.
    """
    given = dict(os.environ if environ is None else environ)
    given.pop("LOCKSTEP_JOINED", None)
    with tempfile.TemporaryDirectory(prefix="lockstep-run-") as folder, _signals() as stops:
        guard = _Guard(folder)
        try:
            attempt = 0
            while True:
                places = place_of_each(len(devices))
                variables = [
                    {**given, **mine, **place, "PYTHONUNBUFFERED": "1"}
                    for mine, place in zip(devices, places, strict=True)
                ]
                group = _Group(command, variables, Path(folder) / str(attempt), guard, stops)
                cause = group.run(patience)
                if stops:
                    return 0 if group.all_ended_well() else 128 + stops[0]
                if cause is None:
                    group.note_script_without_distribute()
                    return 0
                _tell(cause, group)
                if attempt == restarts:
                    return cause.exit_status
                attempt += 1
                say(f"restart {attempt} of {restarts}")
        finally:
            guard.close()


def _tell(cause: Failure, group: "_Group") -> None:
    many = f" of {len(group.ranks)} failed first" if len(group.ranks) > 1 else " failed"
    say(f"process {cause.rank}{many}: {cause}")
    lines = group.ranks[cause.rank].last_lines()
    if cause.rank and lines:  # those of process 0 have just been printed plain
        say("its last lines:")
        for line in lines:
            sys.stderr.write(f"    {line}\n")
        sys.stderr.flush()


@contextmanager
def _signals() -> Iterator[list[int]]:
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


class _Guard:
    """The process that ends the others if this one dies."""

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, str(STOP_WITHIN), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def tell(self, sign: str, process: int) -> None:
        pipe = self._process.stdin
        with contextlib.suppress(OSError):  # somebody has killed it
            assert pipe is not None
            pipe.write(f"{sign}{process}\n")
            pipe.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.communicate(timeout=10)


class _Group:
    """The processes of one attempt."""

    def __init__(
        self,
        command: list[str],
        variables: list[dict[str, str]],
        folder: Path,
        guard: _Guard,
        stops: list[int],
    ) -> None:
        folder.mkdir()
        self._command = command
        self._guard = guard
        self._stops = stops
        self._pipes = selectors.DefaultSelector()
        self.ranks: list[Rank] = []
        for number, mine in enumerate(variables):
            rank = Rank(number, command, mine, folder / f"{number}.json")
            self._guard.tell("+", rank.process.pid)
            self.ranks.append(rank)
            for pipe in rank.outputs:
                self._pipes.register(pipe, selectors.EVENT_READ, rank)

    def run(self, limits: Patience | None) -> Failure | None:
        """Wait until all processes have ended; return the failure that caused the others."""
        failures: dict[int, Failure] = {}
        watch = None if limits is None else Watch(limits, self.ranks)
        try:
            self._wait(failures, watch)
        finally:
            for rank in self.ranks:
                if failures or self._stops or not rank.has_ended():
                    rank.kill()
            self._drain()
            for rank in self.ranks:
                rank.process.wait()
                self._guard.tell("-", rank.process.pid)
                for pipe, output in rank.outputs.items():
                    output.close()
                    pipe.close()
            self._pipes.close()
        if watch is not None and watch.hanging is not None:
            return watch.hanging
        return cause_of([*failures.values()]) if failures else None

    def _wait(self, failures: dict[int, Failure], watch: Watch | None) -> None:
        told = heard = 0
        first_failed = asked_at = 0.0
        still_running = False
        while not all(rank.has_ended() for rank in self.ranks):
            self._pass_on(_POLL)
            now = time.monotonic()
            for rank in self.ranks:
                failure = rank.failure()
                if failure is not None:
                    first_failed = first_failed or now
                    failures[rank.number] = failure
            told, heard = heard, len(self._stops)
            if heard > told:
                if heard > 1:
                    return
                asked_at = now
                for rank in self.ranks:
                    rank.send(signal.SIGTERM)
                say("asked the script to save and stop; Ctrl-C again ends it at once")
            if first_failed and now > first_failed + OTHERS_END_WITHIN:
                return
            if asked_at and now > asked_at + STOP_WITHIN:
                say(f"still running {STOP_WITHIN:.0f} s after the signal: ended")
                return
            if asked_at and not still_running and now > asked_at + _STILL_RUNNING:
                still_running = True
                say("still running; a script without lockstep.Checkpoint may not stop by itself")
            if watch is not None and not failures and not asked_at and watch.look():
                self._pass_on(1.0, times=20)  # the stacks
                return
        for rank in self.ranks:
            failure = rank.failure()
            if failure is not None:
                failures[rank.number] = failure

    def _pass_on(self, seconds: float, times: int = 1) -> None:
        """Pass on what the processes write within this time."""
        until = time.monotonic() + seconds
        for _ in range(times):
            for key, _event in self._pipes.select(max(0.0, until - time.monotonic())):
                pipe, rank = key.fileobj, key.data
                data = os.read(key.fd, 1 << 16)
                if data:
                    rank.outputs[pipe].write(data)
                else:
                    self._pipes.unregister(pipe)

    def _drain(self) -> None:
        """Pass on what is left in the pipes, which a worker of a process may hold open."""
        while self._pipes.get_map() and self._pipes.select(0.0):
            self._pass_on(0.0)

    def all_ended_well(self) -> bool:
        """Return whether every process has exited with 0."""
        return all(rank.code == 0 for rank in self.ranks)

    def note_script_without_distribute(self) -> None:
        """Print a note if several processes have trained alone."""
        alone = not any(rank.status().distributed for rank in self.ranks)
        if alone and len(self.ranks) > 1:
            script = os.path.basename(self._command[1])
            say(
                f"note: {script} never called lockstep.distribute, so {len(self.ranks)} processes "
                "did the same work, each alone"
            )
