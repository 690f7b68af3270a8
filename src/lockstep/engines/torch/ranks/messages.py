"""What rank 0 and the workers of a pool send one another: batches in shared memory, and errors."""

import importlib
import io
import mmap
import os
import pickle
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import keras
import torch

_ALIGNMENT = 64


def new_file() -> int:
    """Return the descriptor of an empty file in memory without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lockstep")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class BatchMemory:
    """Writes a batch in one process, and reads it in the others.

    What was read is valid until the next batch is written.

    Args:
        file: The descriptor of the file, in this process.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._map: Any = None

    def write(self, batch: Any) -> Any:
        """Write the tensors of a nest; return a description that `read` takes."""
        written: list[tuple[Any, _Place]] = []
        end = 0

        def place_of(leaf: Any) -> _Place | None:
            nonlocal end
            if leaf is None:
                return None
            place = _Place(end, leaf.dtype, tuple(leaf.shape))
            written.append((leaf, place))
            end += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
            return place

        description = keras.tree.map_structure(place_of, batch)
        if end > os.fstat(self._file).st_size:
            os.ftruncate(self._file, end)
        for leaf, place in written:
            self._tensor(place).copy_(leaf.detach())
        return description

    def read(self, description: Any) -> Any:
        """Return the tensors at their places. They are no copies."""
        return keras.tree.map_structure(
            lambda place: None if place is None else self._tensor(place), description
        )

    def _tensor(self, place: "_Place") -> Any:
        count = torch.Size(place.shape).numel()
        if not count:
            return torch.empty(place.shape, dtype=place.dtype)
        end = place.start + count * place.dtype.itemsize
        if self._map is None or len(self._map) < end:
            # Tensors of the old map keep it alive.
            self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)
        flat = torch.frombuffer(self._map, dtype=place.dtype, count=count, offset=place.start)
        return flat.view(place.shape)


@dataclass
class _Place:
    """The place of one tensor in the memory."""

    start: int
    dtype: Any
    shape: tuple[int, ...]


def dump_error(error: BaseException) -> bytes | None:
    """Return an error as bytes, `None` if it cannot be pickled.

    The caller finds its class by name among its own.
    """
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
