"""A guard that lets one thread at a time call a model."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.errors import BusyModel

LOOPS = ("fit", "evaluate", "predict")
STEPPING = (*LOOPS, "train_on_batch", "test_on_batch", "predict_on_batch")
"""The methods of a Keras model that run its steps."""

_MOMENT = 0.05
"""Seconds between two checks whether the thread that holds the lock is in `fit`."""


class CallGuard:
    """Lets one thread at a time call a model. Others wait, or get an error during a `fit`.

    Between two steps, the running loop owns the arrays of the variables. In plain Keras, a
    call from a second thread fails, and the weights are lost. On several devices, XLA
    received deleted arrays and terminated the process.

    Args:
        model: The model.
        is_current: Returns whether the methods guarded here are still those of the model.
    """

    def __init__(self, model: Any, is_current: Callable[[], bool]) -> None:
        self._model = model
        self._is_current = is_current
        self._lock = threading.RLock()
        self._calls: list[str] = []
        self._thread: threading.Thread | None = None

    def guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return `method`, wrapped to wait until no other thread is in a call of the model.

        Args:
            name: The name of the method.
            method: The method. It may call other guarded methods in the same thread.
        """

        @functools.wraps(method)
        def guarded_method(*args: Any, **kwargs: Any) -> Any:
            with self.turn(name):
                if self._is_current():
                    return method(*args, **kwargs)
            return getattr(self._model, name)(*args, **kwargs)  # released during the wait

        return guarded_method

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Keep every thread, including this one, out of calls of the model in the context.

        Args:
            name: The name of the operation in the context, for the message.

        Raises:
            BusyModel: If this thread is in a call, or another one in a `fit`.
        """
        if self._calls and self._thread is threading.current_thread():
            raise BusyModel(
                f"{name} of {self._model.name!r} was called during its {self._calls[0]}, for "
                "example by a callback. The devices of a model\n"
                f"cannot change during a call. Call {name} before or after it."
            )
        with self.turn(name):
            yield

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Wait until no other thread is in a call of the model; raise if that is a `fit`."""
        wait = 0.0
        while not self._lock.acquire(timeout=wait):
            if "fit" in self._calls:
                raise BusyModel(
                    f"{name} of {self._model.name!r} was called in thread "
                    f"{threading.current_thread().name!r}, while another thread runs its fit.\n"
                    "A Keras model can run only one call at a time. Wait for the end of fit, or "
                    "use a separate model\n"
                    "in the thread (keras.models.clone_model and set_weights)."
                )
            wait = _MOMENT
        try:
            self._thread = threading.current_thread()
            self._calls.append(name)
            try:
                yield
            finally:
                self._calls.pop()
        finally:
            self._lock.release()
