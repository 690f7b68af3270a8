"""A thread that does one task at a time."""

import threading
from collections.abc import Callable


class Background:
    """Run one task in a thread during training, and never two.

    Attributes:
        failed: What the last piece of work raised, until it is taken.
    """

    def __init__(self, beside: bool) -> None:
        self._beside = beside
        self._thread: threading.Thread | None = None
        self.failed: Exception | None = None

    def busy(self) -> bool:
        """Return whether a task is running."""
        return self._thread is not None and self._thread.is_alive()

    def run(self, work: Callable[[], None]) -> None:
        """Begin a task, after the previous one has ended."""
        self.finish()
        if not self._beside:
            self._guarded(work)
            return
        # No daemon: the end of Python waits for it.
        self._thread = threading.Thread(
            target=self._guarded, args=(work,), name="lockstep checkpoint"
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait until no task is running."""
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None

    def take_failure(self) -> Exception | None:
        """Return the exception of the last task, once."""
        failed, self.failed = self.failed, None
        return failed

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.failed = error
