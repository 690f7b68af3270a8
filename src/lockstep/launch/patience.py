"""Finds the process that stands still, for `lockstep run --patience`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.launch.output import print_line
from lockstep.launch.rank import Failure, Rank
from lockstep.launch.status import DUMP_STACKS, Status

EXIT_STATUS = 124
"""The exit status of a run with a process that stands still, as of `timeout`."""
_LOOK_EVERY = 1.0


@dataclass(frozen=True)
class Patience:
    """How many seconds a process may stand still in a call of a model.

    Attributes:
        compiling: While it starts or compiles.
        running: In between.
    """

    compiling: float = 600.0
    running: float = 120.0


class Watch:
    """Watch the processes of one attempt.

    Outside of the calls of a model, a script may take its time.

    Attributes:
        hanging: How the process that stands still failed, once it is found.
    """

    def __init__(self, patience: Patience, ranks: Sequence[Rank]) -> None:
        self.hanging: Failure | None = None
        self._patience = patience
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
                patience = self._patience
                limit = patience.compiling if status.compiles else patience.running
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
        self.hanging = Failure(slowest.number, EXIT_STATUS, time.time(), found)
