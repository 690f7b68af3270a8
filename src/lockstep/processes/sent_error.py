"""An error of a worker as bytes, for the caller, which finds its class by name among its own."""

import importlib
import io
import pickle
from contextlib import suppress
from operator import attrgetter
from typing import Any


def dump_error(error: BaseException) -> bytes | None:
    """Return an error as bytes, `None` if it cannot be pickled."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(error)
    except Exception:  # an error of the user's own may hold anything
        return None
    return file.getvalue()


def load_error(data: bytes) -> BaseException | None:
    """Return the error, `None` if it cannot be unpickled. No class of the user's is made anew."""
    try:
        error: BaseException = _Unpickler(io.BytesIO(data)).load()
    except Exception:
        return None
    return error


class _Pickler(pickle.Pickler):
    def persistent_id(self, item: Any) -> Any:
        """Return the names of a class and of those that it inherits from."""
        if not isinstance(item, type):
            return None
        return [(each.__module__, each.__qualname__) for each in item.__mro__]


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, names: Any) -> Any:
        """Return the first of these classes that has a place in a module of this process."""
        for module, qualname in names:
            with suppress(ImportError, AttributeError):  # a class that a function has made
                return attrgetter(qualname)(importlib.import_module(module))
        raise pickle.UnpicklingError("no class has a name")
