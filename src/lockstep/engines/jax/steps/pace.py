"""How many steps go into one program, for `steps_per_execution="auto"`."""

import math
import time
from collections.abc import Callable, Generator
from statistics import median

WINDOW = 0.02
"""Seconds of steps in one program, at most. To call one costs about 0.1 ms of Python."""
MOST_STEPS = 64
ROUNDS = 3
GAIN = 0.97
"""A program of several steps is taken where it needs less than this share of the time."""

Turns = Generator[int, int | None, tuple[float, int | None]]


class Pace:
    """Finds out on the first steps of a step function, and keeps to what it found.

    Single steps and programs of several take turns, the devices waited for before and
    after each turn; what needs less time, by the medians, is taken. Steps that are long,
    few in an epoch or large stay single without a trial. Every step of the trial is one
    of the training, and none is run for the trial alone. Where the length of an epoch was
    what bounded it, an epoch of more than twice as many steps begins a new trial.

    Attributes:
        times: How many steps go into one program; `None` until that is found out.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.times: int | None = None
        self._clock = clock
        self._bound_by: int | None = None
        self._epoch = 0
        self._steps: int | None = None
        self._wait: Callable[[], object] = lambda: None
        self._begin_trial()

    def _begin_trial(self) -> None:
        self.times, self._bound_by, self._most = None, None, MOST_STEPS
        self._trial = self._find_out()
        next(self._trial)

    def begin_epoch(self, steps: int | None, wait: Callable[[], object]) -> None:
        """An epoch begins; a turn that was cut off by the end of the last one is void.

        Args:
            steps: How many steps it has, `None` where that is not known.
            wait: Waits until the devices have done every step so far.
        """
        self._epoch += 1
        self._steps, self._wait = steps, wait
        if self._bound_by is not None and (steps is None or steps > 2 * self._bound_by):
            self._begin_trial()

    def end_epoch(self) -> None:
        """Hold nothing of the epoch."""
        self._wait = lambda: None

    def at_most(self, times: int) -> None:
        """No more than so many batches may stand on the devices at once."""
        self._most = min(self._most, times)

    def refuse(self) -> None:
        """A program for several steps cannot be, or is known to be slower."""
        self.times, self._bound_by = 1, None

    def next(self, left: int | None) -> int:
        """How many steps the next program takes.

        Args:
            left: Steps left in this epoch, `None` where that is not known.
        """
        if self.times is None:
            try:
                return self._trial.send(left)
            except StopIteration as found:
                self.times = found.value
        # The rest of an epoch goes step by step, rather than as one more program.
        return 1 if self.times is None or (left is not None and left < self.times) else self.times

    def _find_out(self) -> Generator[int, int | None, int]:
        left = yield 0  # to where the constructor takes it
        for _ in range(2):  # the first one compiles
            left = yield 1
        # The last batch may be smaller, and is left out of what is timed.
        full = None if self._steps is None else self._steps - 1
        if full is not None and full < 4:
            self._bound_by = self._steps
            return 1
        each, left = yield from self._turn(1, min(8, full or 8), left)
        times = min(int(WINDOW / max(each, 1e-9)), self._most, MOST_STEPS)
        if full is not None:
            if times > full // 2:
                times, self._bound_by = full // 2, self._steps
            if times > 1 and full < 20 * times:  # the rest, step by step, would count
                times, self._bound_by = full // math.ceil(full / times), self._steps
        if times < 2:
            return 1
        _, left = yield from self._turn(times, 1, left)  # compiles
        single, several = [], []
        for _ in range(ROUNDS):
            each, left = yield from self._turn(1, 2 * times, left)
            single.append(each)
            each, left = yield from self._turn(times, 2, left)
            several.append(each)
        return times if median(several) < GAIN * median(single) else 1

    def _turn(self, times: int, runs: int, left: int | None) -> Turns:
        """Seconds per step of so many programs after one another, within one epoch."""
        while True:
            while left is not None and left <= times * runs:
                left = yield 1
            epoch = self._epoch
            self._wait()
            begin = self._clock()
            for _ in range(runs):
                left = yield times
            self._wait()
            seconds = self._clock() - begin
            if epoch == self._epoch:
                return seconds / (times * runs), left
