"""Batches that a thread makes ready before their turn."""

import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from itertools import chain, count, repeat
from queue import SimpleQueue
from typing import Any

Draw = Callable[[], Any]
"""Makes one batch, or says `END`."""

END = object()
_LONGEST = 5.0
"""Seconds to wait for a batch that nobody needs any more, of data that others may ask next."""
_LONGEST_ROWS = 0.5
"""And of rows, which are only read."""


class Prefetched:
    """The batches of one pass, of which a few are made while others are in use.

    Their order is the order in which they were asked for, and an error is raised in its turn.
    None is made before the first has been asked for.

    Args:
        draws: What makes each batch.
        again: Whether a batch can be made a second time, out of rows as they are by then.

    Attributes:
        ahead: How many are made ready before their turn.
        left: How many may still be asked for ahead of their turn; `None` for all there are.
    """

    def __init__(self, draws: Iterator[Draw], again: bool = False) -> None:
        self.ahead = 0
        self.left: int | None = None
        self._again = again
        self._draws = draws
        self._given = 0
        self._maker: _Maker | None = None
        self._under_way: deque[tuple[Draw, Future[Any]]] = deque()

    def __iter__(self) -> "Prefetched":
        return self

    def __next__(self) -> Any:
        self._fill(self.ahead + 1)
        # What may not be made ahead is made in its turn, by the caller.
        made = self._under_way.popleft()[1].result() if self._under_way else next(self._draws)()
        if made is END:
            raise StopIteration
        self._given += 1
        self._fill(self.ahead)
        return made

    def begin_epoch(self, ahead: int, batches: int | None) -> None:
        """Let an epoch of so many batches begin, `None` where nobody knows how many."""
        self.ahead = ahead
        self.left = None if batches is None else batches - len(self._under_way)

    def settle(self, waiting: bool) -> None:
        """Take back what was not begun or can be made again, and end the thread if it rests soon.

        A generator that another one uses next has to be at rest; one that waits for what
        never comes is not waited for.
        """
        put_back: list[Draw] = []
        begun: list[Future[Any]] = []
        while self._under_way:
            draw, made = self._under_way[-1]
            if not made.cancel():
                if not self._again:
                    break
                begun.append(made)
            self._under_way.pop()
            put_back.insert(0, draw)
        if put_back:
            self._draws = chain(put_back, self._draws)
        begun += [made for _, made in self._under_way]
        longest = _LONGEST_ROWS if self._again else _LONGEST
        at_rest = not wait(begun, longest if waiting else 0).not_done
        if at_rest and self._maker is not None:
            self._maker.end()
        if at_rest or self._again:
            self._maker = None

    def unused(self, after: int) -> list[Future[Any]]:
        """What was begun and not given, but for the first batches of the pass, so many."""
        self.settle(waiting=False)
        begun = [made for _, made in self._under_way]
        return begun[max(0, after - self._given) :]

    def _fill(self, number: int) -> None:
        while self.ahead and len(self._under_way) < number and self.left != 0:
            draw = next(self._draws, None)
            if draw is None:
                return
            self._maker = self._maker or _Maker()
            self._under_way.append((draw, self._maker.make(draw)))
            if self.left is not None:
                self.left -= 1


class OneGenerator:
    """The passes over one generator, of which none loses what another has had made.

    Each begins with the batches that Keras has looked at, and goes on where the generator is:
    keras/src/trainers/data_adapters/generator_data_adapter.py, peek_and_restore.
    """

    def __init__(self, looked_at: int) -> None:
        self._looked_at = looked_at
        self._kept: deque[Future[Any]] = deque()
        self._current: Prefetched | None = None

    def next_pass(self, batches: Iterator[Any]) -> Prefetched:
        """A pass over these batches, of the generator as well, after those made for others."""
        if self._current is not None:
            self._kept.extendleft(reversed(self._current.unused(self._looked_at)))
        drawn = count()

        def draw() -> Any:
            if next(drawn) >= self._looked_at and self._kept:
                return self._kept.popleft().result()
            return next(batches, END)

        self._current = Prefetched(repeat(draw))
        return self._current


class _Maker:
    """A thread that makes one batch after the other, and ends with this object.

    It is a daemon, for which Python does not wait at its exit, as it does for the threads of
    `concurrent.futures`: also in a process that is forked from it, as workers of a data set are.
    """

    def __init__(self) -> None:
        self._wanted: SimpleQueue[tuple[Draw, Future[Any]] | None] = SimpleQueue()
        context = contextvars.copy_context()  # numpy.errstate, for example
        work = partial(context.run, _work, self._wanted)
        self._thread = threading.Thread(target=work, name="lockstep-input", daemon=True)
        self._thread.start()
        self._finish = weakref.finalize(self, self._wanted.put, None)

    def make(self, draw: Draw) -> Future[Any]:
        """Have a batch made after those that were asked for before."""
        made: Future[Any] = Future()
        self._wanted.put((draw, made))
        return made

    def end(self) -> None:
        """End the thread, which has nothing to make."""
        self._finish()
        self._thread.join()


def _work(wanted: SimpleQueue[tuple[Draw, Future[Any]] | None]) -> None:
    while (task := wanted.get()) is not None:
        draw, made = task
        if made.set_running_or_notify_cancel():
            try:
                made.set_result(draw())
            except BaseException as error:  # raised where the batch is asked for
                made.set_exception(error)
        del task, draw, made  # which hold a batch


def of_rows(rows: Iterator[Any], batch: Callable[[Any], Any]) -> Prefetched:
    """Batches of arrays: which rows they have is drawn in the thread of the caller."""
    return Prefetched((partial(batch, chosen) for chosen in rows), again=True)


def of(batches: Iterator[Any]) -> Prefetched:
    """The batches of any iterator."""
    return Prefetched(repeat(partial(next, batches, END)))
