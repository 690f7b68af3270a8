"""Any data: its first batches, and what fit takes."""

import operator
from collections.abc import Iterable, Iterator
from itertools import count, cycle, islice
from typing import Any

import numpy as np

from lockstep.errors import UnusableData

Batch = tuple[Any, Any, Any]
"""Inputs, targets and sample weights, as arrays or nests of arrays; the last may be None."""


def first_batches(data: Any, number: int, batch_size: int | None) -> list[Batch]:
    """The first `number` batches; where the data is shorter, it starts again.

    Args:
        data: `(x, y)` or `(x, y, sample_weight)` of arrays or nests of arrays, or an
            array or dict of them as x alone, cut into batches in order; or anything that
            gives batches of that form: a `PyDataset`, `tf.data.Dataset`, torch
            `DataLoader` or generator.
        number: How many, at least 1.
        batch_size: Rows per batch where `data` is arrays. Defaults to 32.

    Raises:
        UnusableData: If there is no batch in it, or `batch_size` has no use.
    """
    _check_batch_size(data, batch_size)
    arrays = _is_arrays(data)
    every = list(islice(_cut(data, batch_size or 32) if arrays else _given(data), number))
    if not every:
        raise no_batch(data)
    return list(islice(cycle(every), number))


def for_fit(data: Any, batch_size: int | None) -> Batch:
    """What to hand to `fit`, more than once, as x, y and sample weights.

    Raises:
        UnusableData: If it can be gone through once only, or `batch_size` has no use.
    """
    _check_batch_size(data, batch_size)
    if isinstance(data, Iterator):
        raise UnusableData(
            f"Data for several calls of fit was expected, and a {type(data).__name__} is used up "
            "by one.\nReturn arrays, a PyDataset, a tf.data.Dataset or a DataLoader."
        )
    return _parts(data) if _is_arrays(data) else (data, None, None)


def no_batch(data: Any) -> UnusableData:
    """The error where there is nothing to train on."""
    return UnusableData(
        f"Batches to train on were expected, and the {type(data).__name__} holds none.\n"
        "Hand over (x, y) or a data set with at least one batch."
    )


def turned_round(batch: Batch) -> Batch:
    """The same batch, its rows in reverse order."""
    import keras

    turned: Batch = keras.tree.map_structure(
        lambda leaf: leaf if leaf is None else leaf[::-1].copy(), batch
    )
    return turned


def rolled(batch: Batch, rows: int) -> Batch:
    """The same batch, so many of its last rows moved to the front."""
    import keras

    moved: Batch = keras.tree.map_structure(
        lambda leaf: leaf if leaf is None else np.roll(leaf, rows, axis=0), batch
    )
    return moved


def rows_of(batch: Batch) -> int:
    """The rows of a batch."""
    import keras

    return int(next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None).shape[0])


def _is_arrays(data: Any) -> bool:
    return isinstance(data, tuple | list | dict) or hasattr(data, "__array__")


def count_from_one(value: Any) -> int | None:
    """A whole number of at least 1, of Python's or NumPy's; `None` for anything else."""
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
            f"batch_size={batch_size!r} was given, and a whole number of at least 1 was expected.\n"
            "Leave batch_size out for 32."
        )
    if not _is_arrays(data):
        raise UnusableData(
            f"batch_size={batch_size} was given, and the data is a {type(data).__name__}, which "
            "makes its own batches.\nLeave batch_size out."
        )


def _cut(data: Any, batch_size: int) -> Iterator[Batch]:
    import keras

    whole = _batch(data)
    counts = {leaf.shape[:1] for leaf in keras.tree.flatten(whole) if leaf is not None}
    if len(counts) != 1 or counts == {()}:
        raise UnusableData(
            f"Arrays with one number of rows were expected, and they have {sorted(counts)}.\n"
            "Hand over (x, y) or (x, y, sample_weight) with as many rows in each."
        )
    ((rows,),) = counts
    for start in range(0, rows, batch_size):
        part = slice(start, start + batch_size)
        yield keras.tree.map_structure(
            lambda leaf, part=part: leaf if leaf is None else leaf[part], whole
        )


def _given(data: Any) -> Iterator[Batch]:
    if hasattr(data, "__getitem__") and hasattr(type(data), "num_batches"):
        # A PyDataset can be indexed, and does not end when it is iterated over.
        data = map(data.__getitem__, _numbers(data))
    if not isinstance(data, Iterable):
        raise UnusableData(
            f"Data to train on was expected, and this is a {type(data).__name__}.\n"
            "Hand over (x, y), or a data set that gives such batches."
        )
    for item in data:
        yield _batch(item)


def _numbers(data: Any) -> Iterable[int]:
    """The numbers of the batches of a `PyDataset`, which may have no end."""
    try:
        number = data.num_batches
    except NotImplementedError:  # of a class without a length
        number = None
    return count() if number is None else range(number)


def _batch(item: Any) -> Batch:
    import keras

    as_arrays: Batch = keras.tree.map_structure(_array, _parts(item))
    return as_arrays


def _array(leaf: Any) -> np.ndarray | None:
    if leaf is None:
        return None
    array = np.asarray(leaf)
    if array.dtype == object and hasattr(leaf, "toarray"):
        raise UnusableData(
            f"Dense arrays were expected, and this is a {type(leaf).__name__}.\n"
            "Hand over its toarray(): the numbers are the same."
        )
    return array


def _parts(item: Any) -> Batch:
    if not isinstance(item, tuple | list):
        item = (item,)
    if not 1 <= len(item) <= 3:
        raise UnusableData(
            f"(x, y) or (x, y, sample_weight) was expected, and this has {len(item)} parts.\n"
            "Put several inputs into a list or dict of their own."
        )
    x, y, sample_weight = [*item, None, None][:3]
    return x, y, sample_weight
