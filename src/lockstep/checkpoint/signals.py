"""SIGTERM and SIGINT, put off until a checkpoint is written."""

import multiprocessing
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Signals:
    """While it lasts, the first SIGTERM or SIGINT is noted, and a second SIGINT interrupts.

    A signal that the process ignores stays ignored. Outside of the main thread, where Python
    has no signals, nothing is changed. A process that is forked meanwhile, such as a worker that
    makes batches, has the handlers of before when its first signal comes.

    Attributes:
        asked: The number of the signal that came, `None` while none has.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._before: dict[int, Any] = {}
        self._process = 0

    def __enter__(self) -> "Signals":
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
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
        """End what was asked to end, as the signal would have.

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
