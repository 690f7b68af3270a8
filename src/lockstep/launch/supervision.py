"""Supervises the processes of a run, wherever they are, from their start to their end."""

import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from lockstep.launch.rank import Failure, Rank, cause_of, print_line
from lockstep.launch.status import DUMP_STACKS, Status

_POLL = 0.05
STOP_WITHIN = 120.0
"""Seconds that processes have to save and stop after a signal, as long as Slurm gives them."""
_STILL_RUNNING = 10.0
_STACKS_WITHIN = 1.0
_HANGING = 124
"""The exit status of a run with a process that stands still, as of `timeout`."""
_LOOK_EVERY = 1.0

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class HangTimeout:
    """How many seconds a process may stand still in a call of a model.

    Attributes:
        compiling: While it starts or compiles.
        running: In between.
    """

    compiling: float = 600.0
    running: float = 120.0

    @classmethod
    def of(cls, seconds: float | None) -> "HangTimeout":
        """Return the limits that a user gives: one for both, or `None` for the defaults."""
        return cls() if seconds is None else cls(seconds, seconds)


class Group(ABC):
    """The processes of one attempt.

    Attributes:
        ranks: The processes, by their number.
        others_end_within: Seconds that processes have to end by themselves after one has failed.
    """

    ranks: Sequence[Rank]
    others_end_within = 10.0

    @abstractmethod
    def pass_on(self, seconds: float) -> None:
        """Wait this long for output of the processes, and show what is there."""

    @abstractmethod
    def close(self) -> None:
        """Show the rest of the output, and release what the processes had. All have ended."""

    def all_ended_well(self) -> bool:
        """Return whether every process has exited with 0."""
        return all(rank.code == 0 for rank in self.ranks)


class Watch:
    """Finds the process of one attempt that stands still, for `--hang-timeout`.

    Outside of the calls of a model, a script may take its time.

    Attributes:
        hanging: How the process that stands still failed, once it is found.
    """

    def __init__(self, limits: HangTimeout, ranks: Sequence[Rank]) -> None:
        self.hanging: Failure | None = None
        self._limits = limits
        self._ranks = ranks
        now = time.monotonic()
        self._seen: dict[int, tuple[Status, float]] = {
            rank.number: (Status(), now) for rank in ranks
        }
        self._next_look = now

    def look(self) -> bool:
        """Return whether a process stands still; if so, print which, and the stacks of all."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_EVERY
        running = [rank for rank in self._ranks if not rank.has_ended()]
        too_long = False
        for rank in running:
            status = rank.status()
            before, since = self._seen[rank.number]
            if status != before:
                self._seen[rank.number] = (status, now)
            elif status.phase:
                limits = self._limits
                limit = limits.compiling if status.compiles else limits.running
                too_long |= now - since > limit
        if too_long:
            self._tell(running, now)
        return too_long

    def _tell(self, running: list[Rank], now: float) -> None:
        # The others wait for the process that is stopped, or has made the fewest steps.
        stopped = {rank.number: rank.is_stopped() for rank in running}
        slowest = min(
            running,
            key=lambda rank: (
                not stopped[rank.number],
                self._seen[rank.number][0].step,
                bool(self._seen[rank.number][0].phase),
                self._seen[rank.number][1],
            ),
        )
        for rank in running:
            status, since = self._seen[rank.number]
            words = "; it was stopped by a signal" if stopped[rank.number] else ""
            print_line(
                f"process {rank.number} stands in {status}, since {now - since:.0f} s{words}"
            )
        print_line("the Python stacks of the processes:")
        for rank in running:
            # Another signal would end a process that never imported lockstep.
            if not stopped[rank.number] and rank.reports:
                rank.send(DUMP_STACKS)
        status, since = self._seen[slowest.number]
        text = f"stood still in {status} for {now - since:.0f} s"
        found = Status(failure=f"{text}, stopped by a signal" if stopped[slowest.number] else text)
        self.hanging = Failure(slowest.number, _HANGING, time.time(), found)


GroupT = TypeVar("GroupT", bound=Group)


@dataclass(frozen=True)
class Outcome(Generic[GroupT]):
    """The end of a run.

    Attributes:
        status: 0, the exit status of the process that failed first, or 128 and the number of the
            signal that stopped the run.
        group: The processes of the last attempt.
        cause: The failure that ended the last attempt.
    """

    status: int
    group: GroupT
    cause: Failure | None = None


def run_with_restarts(
    start: Callable[[int], GroupT],
    script: str,
    restarts: int,
    limits: HangTimeout | None,
    stops: list[int],
) -> Outcome[GroupT]:
    """Run processes until they end well, a signal stops them, or no restart is left.

    Args:
        start: Starts all processes; is called with the number of the attempt, from 0.
        script: What they run, for a note.
        restarts: How many times all processes may start again.
        limits: How long a process may stand still, `None` for ever.
        stops: The signals that have asked the run to stop; see `stop_signals`.
    """
    attempt = 0
    while True:
        group = start(attempt)
        cause = _supervise(group, limits, stops)
        if stops:
            return Outcome(0 if group.all_ended_well() else 128 + stops[0], group)
        if cause is None:
            _note_script_without_distribute(group, script)
            return Outcome(0, group)
        _tell(cause, group)
        if attempt == restarts:
            return Outcome(cause.exit_status, group, cause)
        attempt += 1
        print_line(f"restart {attempt} of {restarts}")


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect the signals that ask the run to stop, instead of ending Python."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield asked
        return
    before = {number: signal.getsignal(number) for number in _STOPPING}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda received, _: asked.append(received))
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _supervise(group: Group, limits: HangTimeout | None, stops: list[int]) -> Failure | None:
    """Wait until all processes have ended; return the failure that caused the others."""
    failures: dict[int, Failure] = {}
    watch = None if limits is None else Watch(limits, group.ranks)
    try:
        _wait(group, failures, watch, stops)
    finally:
        for rank in group.ranks:
            if failures or stops or not rank.has_ended():
                rank.kill()
        group.close()
    if watch is not None and watch.hanging is not None:
        return watch.hanging
    return cause_of([*failures.values()]) if failures else None


def _wait(
    group: Group, failures: dict[int, Failure], watch: Watch | None, stops: list[int]
) -> None:
    told = heard = 0
    first_failed = asked_at = 0.0
    still_running = False
    while not all(rank.has_ended() for rank in group.ranks):
        group.pass_on(_POLL)
        now = time.monotonic()
        for rank in group.ranks:
            failure = rank.failure()
            if failure is not None:
                first_failed = first_failed or now
                failures[rank.number] = failure
        told, heard = heard, len(stops)
        if heard > told:
            if heard > 1:
                return
            asked_at = now
            for rank in group.ranks:
                rank.send(signal.SIGTERM)
            print_line("asked the script to save and stop; Ctrl-C again ends it at once")
        if first_failed and now > first_failed + group.others_end_within:
            return
        if asked_at and now > asked_at + STOP_WITHIN:
            print_line(f"still running {STOP_WITHIN:.0f} s after the signal: ended")
            return
        if asked_at and not still_running and now > asked_at + _STILL_RUNNING:
            still_running = True
            print_line("still running; a script without lockstep.Checkpoint may not stop by itself")
        if watch is not None and not failures and not asked_at and watch.look():
            while time.monotonic() < now + _STACKS_WITHIN:
                group.pass_on(_POLL)
            return
    for rank in group.ranks:
        failure = rank.failure()
        if failure is not None:
            failures[rank.number] = failure


def _tell(cause: Failure, group: Group) -> None:
    many = f" of {len(group.ranks)} failed first" if len(group.ranks) > 1 else " failed"
    print_line(f"process {cause.rank}{many}: {cause}")
    lines = group.ranks[cause.rank].last_lines()
    if cause.rank and lines:  # those of process 0 have just been printed plain
        print_line("its last lines:")
        for line in lines:
            sys.stderr.write(f"    {line}\n")
        sys.stderr.flush()


def _note_script_without_distribute(group: Group, script: str) -> None:
    """Print a note if several processes have trained alone."""
    alone = not any(rank.status().distributed for rank in group.ranks)
    if alone and len(group.ranks) > 1:
        print_line(
            f"note: {Path(script).name} never called lockstep.distribute, so {len(group.ranks)} "
            "processes did the same work, each alone"
        )
