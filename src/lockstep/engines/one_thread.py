"""One thread at a time in a model."""

import functools
import threading
from collections.abc import Callable
from typing import Any

from lockstep.errors import BusyModel


class OneThread:
    """Refuses a call of a model while another thread is in one.

    Between two steps the arrays of the variables belong to the loop that runs. Keras alone
    fails where a second one begins, with the weights gone; over several devices XLA was
    given arrays that were gone already, and ended the process.

    Args:
        model: The name of the model.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = threading.RLock()

    def guard(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The same method, for one thread at a time; it may call the others."""

        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not self._lock.acquire(blocking=False):
                raise BusyModel(
                    f"{method.__name__} of {self._model!r} was called in thread "
                    f"{threading.current_thread().name!r}, and another thread is in its fit, "
                    "evaluate or predict.\nA Keras model on JAX does one at a time: let every "
                    "thread call it under one threading.Lock."
                )
            try:
                return method(*args, **kwargs)
            finally:
                self._lock.release()

        return guarded
