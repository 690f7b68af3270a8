"""Data whose batches are made by other processes."""

import threading
import weakref
from typing import Any

from lockstep.keras_compat import PyDatasetAdapter, TorchDataLoaderAdapter, loader_of, worker_pools

# The attributes of the adapters: keras/src/trainers/data_adapters/*.py


def drawn_elsewhere(adapter: Any) -> bool:
    """Return whether a batch that fails has changed no state of this process, random or not."""
    if isinstance(adapter, TorchDataLoaderAdapter):
        return bool(loader_of(adapter).num_workers > 0)
    return _in_pool(adapter)


class Watch:
    """Fail the tasks that an ended worker of a pool has left, which Keras would wait for.

    A signal to all processes of a job ends the workers before this process has saved.
    """

    def __init__(self, adapter: Any) -> None:
        self._over = threading.Event()
        if _in_pool(adapter):
            threading.Thread(target=self._watch, name="lockstep workers", daemon=True).start()

    def stop(self) -> None:
        """Stop."""
        self._over.set()

    def _watch(self) -> None:
        # Lib/multiprocessing/pool.py, Pool: `_pool` are its processes, `_cache` what is undone.
        seen: Any = weakref.WeakKeyDictionary()
        while not self._over.wait(0.25):
            for pool in worker_pools():
                workers = seen.setdefault(pool, set())
                workers.update(pool._pool)
                codes = {worker.exitcode for worker in workers} - {None, 0}
                for job in list(pool._cache.values()) if codes else []:
                    ended = f"A worker of a PyDataset ended with exit code {min(codes)}."
                    job._set(0, (False, RuntimeError(ended)))


def _in_pool(adapter: Any) -> bool:
    mine = isinstance(adapter, PyDatasetAdapter)
    return mine and adapter.enqueuer is not None and adapter.py_dataset.use_multiprocessing
