"""Finds processes of a run that make no progress, for `lockstep run`."""

import time
from collections.abc import Sequence

from lockstep.core.status import DUMP_STACKS, Status
from lockstep.launch.rank import Failure, RankProcess, print_line

NOTE_AFTER = 300.0
"""Seconds without a step of any process until a line says where each process is."""
_HANGING = 124
"""The exit status of a run with a process that stands still, as of `timeout`."""
_LOOK_EVERY = 1.0


class ProgressWatch:
    """Watches the progress of the processes of one attempt.

    It prints one line if no process has made a step for five minutes in a call of a model. With a
    limit, a process that stands still for that long in a call of a model counts as failed. Outside
    of the calls of a model, a script may take its time.

    Args:
        ranks: The processes.
        limit: Seconds that a process may stand still, `None` for ever.

    Attributes:
        hanging: How the process that stands still failed, once it is found.
    """

    def __init__(self, ranks: Sequence[RankProcess], limit: float | None) -> None:
        self.hanging: Failure | None = None
        self._ranks = ranks
        self._limit = limit
        now = time.monotonic()
        self._seen: dict[int, tuple[Status, float]] = {
            rank.number: (Status(), now) for rank in ranks
        }
        self._steps = 0
        self._next_note = now + NOTE_AFTER
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
            elif status.phase and self._limit is not None:
                too_long |= now - since > self._limit
        if too_long:
            self._tell(running, now)
        else:
            self._note(running, now)
        return too_long

    def _note(self, running: list[RankProcess], now: float) -> None:
        """Print where each process is, if none has made a step for long."""
        found = {rank.number: self._seen[rank.number][0] for rank in running}
        steps = sum(status.step for status, _since in self._seen.values())
        if steps != self._steps or not any(status.phase for status in found.values()):
            self._steps, self._next_note = steps, now + NOTE_AFTER
        elif now >= self._next_note:
            self._next_note = now + NOTE_AFTER
            places = "; ".join(f"process {number} in {each}" for number, each in found.items())
            print_line(f"no step for {NOTE_AFTER / 60:.0f} minutes: {places}")

    def _tell(self, running: list[RankProcess], now: float) -> None:
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
            words = "; it was suspended by a signal" if stopped[rank.number] else ""
            print_line(
                f"process {rank.number} has made no progress in {status} for {now - since:.0f} "
                f"s{words}"
            )
        print_line("the Python stacks of the processes:")
        for rank in running:
            # Another signal would end a process that never imported lockstep.
            if not stopped[rank.number] and rank.reports:
                rank.send(DUMP_STACKS)
        status, since = self._seen[slowest.number]
        text = f"made no progress in {status} for {now - since:.0f} s"
        found = Status(
            failure=f"{text}, suspended by a signal" if stopped[slowest.number] else text
        )
        self.hanging = Failure(slowest.number, _HANGING, time.time(), found)
