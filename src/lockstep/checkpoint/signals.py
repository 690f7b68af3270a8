"""Delays SIGTERM and SIGINT until a checkpoint is written."""

import multiprocessing
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Signals:
    """Record the first SIGTERM or SIGINT in this context; a second SIGINT interrupts.

    Args:
        numbers: The signals that are recorded.

    Signals that the process ignores stay ignored. In other threads than the main thread, Python
    has no signals, and nothing changes. A forked process, such as a worker that makes batches,
    gets the earlier handlers back at its first signal.

    Attributes:
        asked: The number of the recorded signal, or `None`.
    """

    def __init__(self, numbers: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self.asked: int | None = None
        self._numbers = numbers
        self._before: dict[int, Any] = {}
        self._process = 0

    def __enter__(self) -> "Signals":
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._put_back()

    def leave(self) -> None:
        """End the process or the call as the recorded signal would have.

        Raises:
            KeyboardInterrupt: For SIGINT.
            SystemExit: For SIGTERM, with the status 143 that schedulers know, after the
                handler that the script has, if any.
        """
        number, before = self.asked, self._before.get(self.asked or 0)
        self._put_back()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if callable(before):
            before(number, None)
        raise SystemExit(128 + signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a fork, which a pool of workers ends by SIGTERM
            by_default = self._before.get(number) is signal.SIG_DFL
            self._put_back()
            if by_default and multiprocessing.parent_process() is not None:
                raise SystemExit(128 + number)  # which lets go of the locks of its pool
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT and self.asked == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = number

    def _put_back(self) -> None:
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, before)
