"""Batches that a thread prepares in advance."""

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
"""Makes one batch, or returns `END`."""

END = object()
_LONGEST = 5.0
"""The longest wait in seconds for an unneeded batch. Other code may use the data next."""
_LONGEST_ROWS = 0.5
"""The same for batches of array rows, which are only read."""


class Prefetched:
    """Iterate over the batches of one pass, and make a few of them in advance.

    Batches come in the order of their draws, and an error is raised in its place. No batch is made
    before the first one is requested.

    Args:
        draws: The functions that make the batches.
        again: Whether a batch can be made a second time, from the current rows.

    Attributes:
        ahead: The number of batches made in advance.
        left: The number of batches that may still be made in advance; `None` for no limit.
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
        # A batch that may not be made in advance is made here, by the caller.
        made = self._under_way.popleft()[1].result() if self._under_way else next(self._draws)()
        if made is END:
            raise StopIteration
        self._given += 1
        self._fill(self.ahead)
        return made

    def begin_epoch(self, ahead: int, batches: int | None) -> None:
        """Begin an epoch of `batches` batches; `None` if the number is unknown."""
        self.ahead = ahead
        self.left = None if batches is None else batches - len(self._under_way)

    def settle(self, waiting: bool) -> None:
        """Take back the batches that can be made later, and end the thread if it becomes idle.

        These are the batches not begun, and those that can be made again. A generator has to be
        idle before another pass uses it. The wait has a limit, for a generator that never returns.
        """
        taken_back: list[Draw] = []
        begun: list[Future[Any]] = []
        while self._under_way:
            draw, made = self._under_way[-1]
            if not made.cancel():
                if not self._again:
                    break
                begun.append(made)
            self._under_way.pop()
            taken_back.insert(0, draw)
        if taken_back:
            self._draws = chain(taken_back, self._draws)
        begun += [made for _, made in self._under_way]
        longest = _LONGEST_ROWS if self._again else _LONGEST
        at_rest = not wait(begun, longest if waiting else 0).not_done
        if at_rest and self._maker is not None:
            self._maker.end()
        if at_rest or self._again:
            self._maker = None

    def unused(self, after: int) -> list[Future[Any]]:
        """Return the begun batches that were not used, without the first `after` of the pass."""
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
    """Manage the passes over one generator, so that no prefetched batch is lost.

    Each pass begins with the batches that Keras inspected, and continues at the generator's
    position: keras/src/trainers/data_adapters/generator_data_adapter.py, peek_and_restore.
    """

    def __init__(self, looked_at: int) -> None:
        self._looked_at = looked_at
        self._kept: deque[Future[Any]] = deque()
        self._current: Prefetched | None = None

    def next_pass(self, batches: Iterator[Any]) -> Prefetched:
        """Return a pass over these batches, after the unused batches of earlier passes."""
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
    """A thread that makes batches in order, and ends with this object.

    It is a daemon thread, so that Python does not wait for it at exit, unlike the threads of
    `concurrent.futures`. That includes a process forked from this one, such as a data worker.
    """

    def __init__(self) -> None:
        self._wanted: SimpleQueue[tuple[Draw, Future[Any]] | None] = SimpleQueue()
        context = contextvars.copy_context()  # numpy.errstate, for example
        work = partial(context.run, _work, self._wanted)
        self._thread = threading.Thread(target=work, name="lockstep-input", daemon=True)
        self._thread.start()
        self._finish = weakref.finalize(self, self._wanted.put, None)

    def make(self, draw: Draw) -> Future[Any]:
        """Queue a batch to be made."""
        made: Future[Any] = Future()
        self._wanted.put((draw, made))
        return made

    def end(self) -> None:
        """End the idle thread."""
        self._finish()
        self._thread.join()


def _work(wanted: SimpleQueue[tuple[Draw, Future[Any]] | None]) -> None:
    while (task := wanted.get()) is not None:
        draw, made = task
        if made.set_running_or_notify_cancel():
            try:
                made.set_result(draw())
            except BaseException as error:  # raised where the batch is requested
                made.set_exception(error)
        del task, draw, made  # they hold a batch


def of_rows(rows: Iterator[Any], batch: Callable[[Any], Any]) -> Prefetched:
    """Prefetch batches of arrays. The caller's thread draws the row numbers."""
    return Prefetched((partial(batch, chosen) for chosen in rows), again=True)


def of(batches: Iterator[Any]) -> Prefetched:
    """Prefetch the batches of any iterator."""
    return Prefetched(repeat(partial(next, batches, END)))
