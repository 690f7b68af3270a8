"""Notices a worker that has ended, or is stopped, while rank 0 waits for it."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lockstep.processes.coordination import patience

_EVERY = 1.0


class WorkerWatch:
    """Looks after the workers of a pool once a second, in a thread, while they are in use.

    A worker that stays stopped for `LOCKSTEP_PATIENCE` seconds is killed, because no call to it
    would return. Rank 0 then meets its end as that of any other worker.

    Args:
        workers: The processes.
        lost: Called when one of them has ended. Gloo notices by itself, and NCCL does not.
        rest: Called once a second while they are not in use.

    Attributes:
        stopped: The seconds that a killed worker had been stopped, by its process id.
    """

    def __init__(
        self,
        workers: "Sequence[subprocess.Popen[bytes]]",
        lost: Callable[[], None],
        rest: Callable[[], None],
    ) -> None:
        self.stopped: dict[int, float] = {}
        self._workers = workers
        self._lost = lost
        self._rest = rest
        self._limit = patience()
        self._busy = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="lockstep-workers", daemon=True).start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look after the workers inside the context."""
        before = self._busy.is_set()
        self._busy.set()
        try:
            yield
        finally:
            if not before:
                self._busy.clear()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _run(self) -> None:
        # Looks are counted, and not time: a stop of the whole job by Ctrl-Z stops them too.
        looks = dict.fromkeys([worker.pid for worker in self._workers], 0)
        while not self._closed.wait(_EVERY):
            if not self._busy.is_set():
                self._rest()
                continue
            for worker in self._workers:
                stopped = self._busy.is_set() and _is_stopped(worker)
                looks[worker.pid] = looks[worker.pid] + 1 if stopped else 0
                if looks[worker.pid] * _EVERY >= self._limit:
                    self.stopped[worker.pid] = self._limit
                    worker.kill()
            if any(worker.poll() is not None for worker in self._workers):
                self._lost()
                return


def _is_stopped(worker: "subprocess.Popen[bytes]") -> bool:
    try:
        # WNOWAIT leaves the state for `subprocess`.
        found = os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it has ended
        return False
    return found is not None
