"""Delays signals until an exception from their handler loses no values."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from lockstep.keras_compat import catches_interrupts

Result = TypeVar("Result")

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Signals that scripts, notebooks and schedulers use to interrupt Python code."""

held: list[tuple["HeldSignals", int, FrameType | None]] = []
"""Signals that are not handled yet, in order. After each step: `if held: handle_held()`."""


class HeldSignals:
    """Holds signals back while an exception would lose values.

    Python runs signal handlers between two instructions of the main thread. So Ctrl-C may
    raise `KeyboardInterrupt` between a call that returns the only copy of a value and the
    instruction that stores it. This class replaces the handlers of the script. It calls them
    at once if `may_interrupt` allows it, otherwise later.

    Signals within code of Keras that catches every exception are held back too: it would drop a
    `KeyboardInterrupt`.

    Handlers installed during `run` are not held back. In other threads than the main thread,
    Python runs no handlers, and this class changes nothing.

    Args:
        may_interrupt: Returns whether an exception at this moment loses no values.
    """

    def __init__(self, may_interrupt: Callable[[], bool]) -> None:
        self._may_interrupt = may_interrupt
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self._finishing = True

    def run(self, body: Callable[[], Result], finish: Callable[[], object]) -> Result:
        """Return the result of `body` after a complete run of `finish`.

        At most one signal raises an exception before `finish` is done; others are handled
        after it. That exception may come at the first instruction of a `finally`. So `finish`
        is called in two `finally` blocks, and has nothing to do the second time.

        Args:
            body: Code that signals may interrupt.
            finish: Code that signals may not interrupt. It is called twice.
        """
        try:
            try:
                self._install()
                self._finishing = False
                handle_held()
                return body()
            finally:
                self._finishing = True
                finish()
        finally:
            self._finishing = True
            try:
                finish()
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
        elif self._finishing or not self._may_interrupt() or catches_interrupts(frame):
            held.append((self, number, frame))
        else:
            self.handle(number, frame)

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if callable(before):
                self._before[number] = before
                signal.signal(number, self._note)

    def _restore(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:  # else the script has replaced it
                signal.signal(number, before)
        # If a script restores this handler later, the handler calls the one before it.
        self._process = -1
        mine = [(number, frame) for who, number, frame in held if who is self]
        held[:] = [each for each in held if each[0] is not self]
        self._handle_each(mine)

    def _handle_each(self, signals: list[tuple[int, FrameType | None]]) -> None:
        if signals:
            number, frame = signals[0]
            try:
                self._before[number](number, frame)
            finally:
                self._handle_each(signals[1:])


def handle_held() -> None:
    """Call the handlers of the signals that were held back, in the main thread."""
    while held and threading.current_thread() is threading.main_thread():
        who, number, frame = held.pop(0)
        who.handle(number, frame)
