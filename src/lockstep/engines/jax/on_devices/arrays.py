"""Data sets of NumPy arrays, and their batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import NumpySliceable, convert_to_sliceable

Rows = np.ndarray | slice


@dataclass(frozen=True)
class Arrays:
    """NumPy arrays, of which a batch has the same rows each.

    Attributes:
        leaves: The arrays.
        pack: From a part of each to a batch, in the order and structure of the data set.
    """

    leaves: tuple[np.ndarray, ...]
    pack: Callable[[tuple[Any, ...]], Any]

    @property
    def native(self) -> bool:
        """Whether JAX's own way in is right for every leaf of every batch."""
        return all(map(is_native, self.leaves))

    def batch(self, rows: Rows) -> Any:
        """A batch of these rows, in arrays of its own."""
        if isinstance(rows, slice):
            return self.pack(tuple([array[rows].copy() for array in self.leaves]))
        return self.pack(tuple([array.take(rows, axis=0) for array in self.leaves]))

    def view(self, rows: Rows) -> Any:
        """A batch of these rows; where they are a slice, in the memory of the data set."""
        return self.pack(tuple([array[rows] for array in self.leaves]))


def is_native(leaf: Any) -> bool:
    """Whether JAX's own way in is right for it, and fast, where nothing is split."""
    return type(leaf) is np.ndarray and leaf.dtype.isnative


def host_array(leaf: Any) -> np.ndarray:
    """A leaf of a batch as an array that JAX can be given."""
    # A masked array JAX refuses in words of its own; without its mask it would train on all.
    if isinstance(leaf, np.ma.MaskedArray):
        return leaf
    array = np.asarray(leaf)
    # Padding would make the bytes native, and JAX takes no others: not only where it is padded.
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def plain_arrays(adapter: Any) -> Arrays | None:
    """The data set of an adapter, where it is NumPy arrays and nothing else, or `None`."""
    # keras/src/trainers/data_adapters/array_data_adapter.py, ArrayDataAdapter.__init__
    if type(adapter) is not ArrayDataAdapter:
        return None
    parts = convert_to_sliceable(adapter._inputs, target_backend="jax")
    sliceable = keras.tree.flatten(parts)
    if not sliceable or any(type(part) is not NumpySliceable for part in sliceable):
        return None
    leaves = tuple([part.array for part in sliceable])
    if any(isinstance(array, np.ma.MaskedArray) for array in leaves):
        return None
    if parts is sliceable[0]:
        return Arrays(leaves, _alone)
    if type(parts) is tuple and all(type(part) is NumpySliceable for part in parts):
        return Arrays(leaves, _as_it_is)
    return Arrays(leaves, partial(keras.tree.pack_sequence_as, parts))


def _alone(parts: tuple[Any, ...]) -> Any:
    return parts[0]


def _as_it_is(parts: tuple[Any, ...]) -> Any:
    return parts


def row_numbers(adapter: Any, skip: int) -> Iterator[Rows]:
    """Which rows each batch has, but for so many at the beginning."""
    # keras/src/trainers/data_adapters/array_data_adapter.py, ArrayDataAdapter._get_iterator
    rows, size, shuffle = adapter._num_samples, adapter._batch_size, adapter._shuffle
    order = np.random.permutation(rows) if shuffle and shuffle != "batch" else None
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        if start < skip * size:
            if shuffle == "batch":
                np.random.permutation(stop - start)
            continue
        if order is not None:
            yield order[start:stop]
        elif shuffle:
            yield np.random.permutation(stop - start) + start
        else:
            yield slice(start, stop)
