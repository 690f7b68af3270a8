"""Data sets of NumPy arrays, and their batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import keras
import numpy as np

from lockstep.keras_compat import (
    ArrayDataAdapter,
    NumpySliceable,
    batch_size_of,
    convert_to_sliceable,
    inputs_of,
    number_of_rows,
    row_indices,
    shuffle_of,
)

Rows = np.ndarray | slice


@dataclass(frozen=True)
class Arrays:
    """NumPy arrays with the same rows in each batch.

    Attributes:
        leaves: The arrays.
        pack: Builds a batch in the structure of the data set from a part of each array.
    """

    leaves: tuple[np.ndarray, ...]
    pack: Callable[[tuple[Any, ...]], Any]

    def batch(self, rows: Rows, *, copied: bool = True) -> Any:
        """Return a batch of these rows, as copies, or as views where rows follow each other."""
        if isinstance(rows, slice):
            views = tuple([array[rows] for array in self.leaves])
            return self.pack(tuple([view.copy() for view in views]) if copied else views)
        return self.pack(tuple([array.take(rows, axis=0) for array in self.leaves]))


def is_native(leaf: Any) -> bool:
    """Return whether JAX can take the leaf fast and without conversion, if nothing is split."""
    return type(leaf) is np.ndarray and leaf.dtype.isnative


def host_array(leaf: Any) -> np.ndarray:
    """Return a leaf of a batch as an array that JAX accepts."""
    # JAX raises its own error for a masked array. Without its mask JAX would train on all values.
    if isinstance(leaf, np.ma.MaskedArray):
        return leaf
    array = np.asarray(leaf)
    # JAX accepts native byte order only. Padding makes it native, but not every batch is padded.
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def plain_arrays(adapter: Any) -> Arrays | None:
    """Return the data set of an adapter if it consists of NumPy arrays only, else `None`."""
    if type(adapter) is not ArrayDataAdapter:
        return None
    parts = convert_to_sliceable(inputs_of(adapter), target_backend="jax")
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
    """Yield the rows of each batch of a pass, without the first `skip` batches.

    Keras's adapter draws the order, including that of the skipped batches.
    """
    rows, size = number_of_rows(adapter), batch_size_of(adapter)
    if not shuffle_of(
        adapter
    ):  # one after the other, with less Python in each than Keras's iterator
        return (slice(n, min(n + size, rows)) for n in range(skip * size, rows, size))
    return islice(row_indices(adapter), skip, None)
