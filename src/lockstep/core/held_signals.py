"""Delays signals until an exception from their handler loses no values."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from lockstep.keras_compat import catches_interrupts

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Signals that scripts, notebooks and schedulers use to interrupt Python code."""

held: list[tuple["HeldSignals", int, FrameType | None]] = []
"""Signals that are not handled yet, in order. After each step: `if held: handle_held()`."""


class HeldSignals:
    """Holds signals back inside the context while an exception would lose values.

    Python runs signal handlers between two instructions of the main thread. So Ctrl-C may
    raise `KeyboardInterrupt` between a call that returns the only copy of a value and the
    instruction that stores it. This class replaces the handlers of the script. It calls them
    at once if `may_interrupt` allows it, otherwise later. At its end the context runs `finish`
    to the end, and then the handlers of the signals that came meanwhile.

    Signals within code of Keras that catches every exception are held back too: it would drop a
    `KeyboardInterrupt`.

    Handlers installed inside the context are not held back. In other threads than the main thread,
    Python runs no handlers, and this class changes nothing.

    A subclass defines when a signal may interrupt (`may_interrupt`), and what runs at the end
    (`finish`). Used as it is, the class holds every signal back.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self._finishing = True

    def may_interrupt(self) -> bool:
        """Return whether an exception at this moment loses no values."""
        return False

    def begin(self) -> Any:
        """Begin, and return what the context gives; `finish` follows, whatever happens."""
        return self

    def finish(self, error: BaseException | None) -> None:
        """Put values back, at the end of the context; signals do not interrupt it.

        Args:
            error: What ends the context, `None` if nothing went wrong.
        """

    def __enter__(self) -> Any:
        """Hold signals back from now on."""
        try:
            self._install()
            self._finishing = False
            handle_held()
            return self.begin()
        except BaseException as error:
            self._end(error)
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Finish, and handle the signals that were held back."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._finishing = True
        try:
            self.finish(error)
        finally:
            self._restore()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Call the handler of the script; if it raises, hold further signals back."""
        self._finishing = True
        self._before[number](number, frame)
        self._finishing = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked worker has no values to lose
            self._before[number](number, frame)
        elif self._is_whole_at(frame) and not catches_interrupts(frame):
            self.handle(number, frame)
        else:
            held.append((self, number, frame))

    def _is_whole_at(self, frame: FrameType | None) -> bool:
        """Return whether a signal may interrupt a frame.

        Nothing would run `finish` if an exception came between the begin of `__exit__` and that.
        """
        ends = frame is not None and frame.f_code in _ENDS
        return not (self._finishing or ends) and self.may_interrupt()

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if callable(before):
                self._before[number] = before
                signal.signal(number, self._note)

    def _restore(self) -> None:
        ended = {id(self)}
        for number, before in self._before.items():
            holder = getattr(signal.getsignal(number), "__self__", None)
            while isinstance(holder, HeldSignals) and holder is not self:
                ended.add(id(holder))  # a debugger has left its context without `__exit__`
                holder = getattr(holder._before.get(number), "__self__", None)
            if holder is self:  # else the script has replaced the handler
                signal.signal(number, before)
        # If a script restores this handler later, the handler calls the one before it.
        self._process = -1
        mine = [(number, frame) for who, number, frame in held if id(who) in ended]
        held[:] = [each for each in held if id(each[0]) not in ended]
        self._handle_each(mine)

    def _handle_each(self, signals: list[tuple[int, FrameType | None]]) -> None:
        if signals:
            number, frame = signals[0]
            try:
                self._before[number](number, frame)
            finally:
                self._handle_each(signals[1:])


_ENDS = (HeldSignals.__exit__.__code__, HeldSignals._end.__code__)


def handle_held() -> None:
    """Call the handlers of the signals that were held back, in the main thread."""
    while held and threading.current_thread() is threading.main_thread():
        who, number, frame = held.pop(0)
        who.handle(number, frame)
