"""One thread at a time in a model."""

import functools
import threading
from collections.abc import Callable
from typing import Any

from lockstep.errors import BusyModel

_MOMENT = 0.05
"""Seconds to wait for another thread's batch before looking what it is in."""


class OneThread:
    """Lets one thread at a time call a model: each batch in its turn, and no second loop.

    Between two steps the arrays of the variables belong to the loop that runs. Keras alone
    fails where a second one begins, with the weights gone; over several devices XLA was
    given arrays that were gone already, and ended the process.

    Args:
        model: The name of the model.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = threading.RLock()
        self._in_loop = False

    def loop(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The same method, of many steps; it may call the others."""
        return self._guarded(method, is_loop=True)

    def batch(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The same method, of one step, for the end of which other threads wait."""
        return self._guarded(method, is_loop=False)

    def _guarded(self, method: Callable[..., Any], is_loop: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._enter(method.__name__)
            before = self._in_loop
            try:
                self._in_loop = before or is_loop
                return method(*args, **kwargs)
            finally:
                self._in_loop = before
                self._lock.release()

        return guarded

    def _enter(self, name: str) -> None:
        wait = 0.0
        while not self._lock.acquire(timeout=wait):
            if self._in_loop:
                raise BusyModel(
                    f"{name} of {self._model!r} was called in thread "
                    f"{threading.current_thread().name!r}, and another thread is in its fit, "
                    "evaluate or predict.\nA Keras model on JAX does one at a time: let every "
                    "thread call it under one threading.Lock."
                )
            wait = _MOMENT
