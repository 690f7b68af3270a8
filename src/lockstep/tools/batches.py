"""The first batches of any data, and data as arguments of `fit`."""

import operator
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any

import numpy as np

from lockstep.core.process_local import ProcessLocal
from lockstep.errors import UnusableData, counted, first_line

Batch = Any
"""The argument of a training step: an array or a nest of arrays, in the structure of `fit`."""

Parts = tuple[Any, Any, Any]
"""Inputs or a data set, targets and sample weights; the last two may be None."""


def first_batches(data: Any, number: int, batch_size: int | None) -> list[Batch]:
    """Return the first `number` batches, as `fit` passes them to a training step.

    Data with fewer batches start again.

    Args:
        data: `(x, y)` or `(x, y, sample_weight)` of arrays or nests of arrays, or an
            array or dict of them as x alone, cut into batches in order; or a data set that
            `fit` takes: a `PyDataset`, `tf.data.Dataset`, torch `DataLoader` or generator.
        number: The number of batches, at least 1.
        batch_size: Rows per batch where `data` is arrays. Defaults to 32.

    Raises:
        UnusableData: If the data have no batch, `fit` does not accept them, or `batch_size` does
            not apply.
    """
    # Keras is not imported by `import lockstep`.
    from lockstep.tools.fit_batches import fit_batches

    data = _unwrapped(data)
    if isinstance(data, ProcessLocal):
        data = data.data()
    _check_batch_size(data, batch_size)
    if _is_arrays(data):
        parts = _parts(data)
        _check_rows(parts)
    else:
        parts = (_data_set(data), None, None)
    try:
        every = list(islice(fit_batches(*parts, batch_size=batch_size), number))
    except ValueError as error:
        raise UnusableData(
            f"Keras's fit does not accept this {type(data).__name__}: {first_line(error)}\n"
            "Pass (x, y), or a data set that fit accepts."
        ) from error
    if not every:
        raise no_batch(data)
    return list(islice(cycle(every), number))


def for_fit(data: Any, batch_size: int | None) -> Parts:
    """Return x, y and sample weights for several calls of `fit`.

    Raises:
        UnusableData: If the data can be read only once, or `batch_size` does not apply.
    """
    data = _unwrapped(data)
    _check_batch_size(data, batch_size)
    if isinstance(data, Iterator):
        raise UnusableData(
            f"Data for several calls of fit were expected, but a {type(data).__name__} is used "
            "up after one.\nReturn arrays, a PyDataset, a tf.data.Dataset or a DataLoader."
        )
    return _parts(data) if _is_arrays(data) else (data, None, None)


def _unwrapped(data: Any) -> Any:
    """Return what `process_local` was given, in one process; a function stays wrapped.

    Raises:
        UnusableData: If several processes run: each would measure with other data.
    """
    from lockstep.processes.process_group import several

    if not isinstance(data, ProcessLocal):
        return data
    if several():
        raise UnusableData(
            f"{data!r} was given, but bench and plan need the data of all processes.\n"
            "Pass the same global batch in every process."
        )
    return data if data.makes_batches is not None else data.data


def no_batch(data: Any) -> UnusableData:
    """Return the error for data without a batch."""
    return UnusableData(
        f"Training batches were expected, but the {type(data).__name__} has none.\n"
        "Pass (x, y) or a data set with at least one batch."
    )


def rows_of(batch: Batch) -> int:
    """Return the rows of a batch: those of its first array that has rows, or 0."""
    import keras

    leaves = (leaf for leaf in keras.tree.flatten(batch) if leaf is not None and leaf.ndim)
    first = next(leaves, None)
    return 0 if first is None else int(first.shape[0])


def _is_arrays(data: Any) -> bool:
    return isinstance(data, tuple | list | dict) or hasattr(data, "__array__")


def count_from_one(value: Any) -> int | None:
    """Return a whole number of Python or NumPy of at least 1, or `None` for other values."""
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return None if isinstance(value, bool) or number < 1 else number


def _check_batch_size(data: Any, batch_size: int | None) -> None:
    if batch_size is None:
        return
    if count_from_one(batch_size) is None:
        raise UnusableData(
            f"batch_size={batch_size!r} was given, but a whole number of at least 1 was "
            "expected.\nRemove batch_size to use the default of 32."
        )
    if not _is_arrays(data):
        raise UnusableData(
            f"batch_size={batch_size} was given, but the data are a {type(data).__name__}, "
            "which makes its own batches.\nRemove batch_size."
        )


def _check_rows(parts: Parts) -> None:
    """Raise for sparse arrays, and for arrays with different numbers of rows."""
    import keras

    leaves = [_array(leaf) for leaf in keras.tree.flatten(parts) if leaf is not None]
    counts = {leaf.shape[:1] for leaf in leaves}
    if len(counts) != 1 or counts == {()}:
        raise UnusableData(
            f"All arrays need the same number of rows, but they have {sorted(counts)}.\n"
            "Pass (x, y) or (x, y, sample_weight) with equal numbers of rows."
        )
    if counts == {(0,)}:
        raise no_batch(parts[0])


def _data_set(data: Any) -> Any:
    """Return a data set that can be inspected: an iterator as a generator with a first batch."""
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise UnusableData(
            f"Training data were expected, but got a {type(data).__name__}.\n"
            "Pass (x, y), or a data set that yields such batches."
        )
    if not isinstance(data, Iterator):
        return data
    first = list(islice(data, 1))
    if not first:
        raise no_batch(data)
    return (item for item in chain(first, data))


def _array(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    if array.dtype == object and hasattr(leaf, "toarray"):
        raise UnusableData(
            f"Dense arrays were expected, but got a {type(leaf).__name__}.\n"
            "Pass the result of its toarray(): the values are the same."
        )
    return array


def _parts(item: Any) -> Parts:
    if not isinstance(item, tuple | list):
        item = (item,)
    if not 1 <= len(item) <= 3:
        raise UnusableData(
            "(x, y) or (x, y, sample_weight) was expected, but got "
            f"{counted(len(item), 'part')}.\n"
            "Put several inputs into one list or dict."
        )
    x, y, sample_weight = [*item, None, None][:3]
    return x, y, sample_weight
