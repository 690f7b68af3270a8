"""Batches that a thread makes ready before their turn."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, repeat
from typing import Any

Draw = Callable[[], Any]
"""Makes one batch, or says `END`."""

END = object()


class Prefetched:
    """The batches of one pass, of which a few are made while others are in use.

    Their order is the order in which they were asked for, and an error is raised in its turn.
    None is made before the first has been asked for.

    Attributes:
        ahead: How many are made ready before their turn.
        left: How many may still be asked for ahead of their turn; `None` for all there are.
    """

    def __init__(self, draws: Iterator[Draw]) -> None:
        self.ahead = 0
        self.left: int | None = None
        self._draws = draws
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: deque[tuple[Draw, Future[Any]]] = deque()

    def __iter__(self) -> "Prefetched":
        return self

    def __next__(self) -> Any:
        self._fill(self.ahead + 1)
        # What may not be made ahead is made in its turn, by the caller.
        made = self._under_way.popleft()[1].result() if self._under_way else next(self._draws)()
        if made is END:
            raise StopIteration
        self._fill(self.ahead)
        return made

    def begin_epoch(self, ahead: int, batches: int | None) -> None:
        """Let an epoch of so many batches begin, `None` where nobody knows how many."""
        self.ahead = ahead
        self.left = None if batches is None else batches - len(self._under_way)

    def settle(self, waiting: bool) -> None:
        """End the thread, and wait for what it is making; the rest can be asked for again."""
        put_back: list[Draw] = []
        while self._under_way and self._under_way[-1][1].cancel():
            put_back.insert(0, self._under_way.pop()[0])
        if put_back:
            self._draws = chain(put_back, self._draws)
        if self._thread is not None:
            self._thread.shutdown(waiting)
            self._thread = None

    def _fill(self, number: int) -> None:
        while self.ahead and len(self._under_way) < number and self.left != 0:
            draw = next(self._draws, None)
            if draw is None:
                return
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "lockstep-input")
            self._under_way.append((draw, self._thread.submit(draw)))
            if self.left is not None:
                self.left -= 1


def of_rows(rows: Iterator[Any], batch: Callable[[Any], Any]) -> Prefetched:
    """Batches of arrays: which rows they have is drawn in the thread of the caller."""
    return Prefetched(partial(batch, chosen) for chosen in rows)


def of(batches: Iterator[Any]) -> Prefetched:
    """The batches of any iterator."""
    return Prefetched(repeat(partial(next, batches, END)))
