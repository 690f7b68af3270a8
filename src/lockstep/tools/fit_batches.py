"""Batches in the structure that `fit` passes to a training step."""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import keras
import numpy as np

# keras/src/trainers/epoch_iterator.py, EpochIterator: where `fit` gets its batches from
from lockstep.keras_compat import get_data_adapter, standardized


def fit_batches(
    x: Any, y: Any = None, sample_weight: Any = None, batch_size: int | None = None
) -> Iterator[Any]:
    """Return one epoch of batches, in order, in the structure of `fit`.

    For example, a data set of bare inputs gives bare inputs instead of a tuple.

    Args:
        x: Inputs or a data set, as in `fit`.
        y: Targets, if `x` is inputs.
        sample_weight: Sample weights, if `x` is inputs.
        batch_size: Rows of a batch, if `x` is inputs. Defaults to 32.

    Raises:
        ValueError: From Keras, if `fit` does not accept the data.
    """
    adapter = get_data_adapter(x, y, sample_weight, batch_size=batch_size, shuffle=False)
    if isinstance(x, keras.utils.PyDataset):
        # keras/src/trainers/data_adapters/py_dataset_adapter.py, PyDatasetAdapter: its
        # iterator starts workers, and its end of epoch may change the data set.
        batches = (standardized(adapter, x[number]) for number in _numbers(x))
    else:
        batches = adapter.get_numpy_iterator()
    # The copy is needed because a data set may write the next batch into the same array.
    return (
        keras.tree.map_structure(lambda leaf: leaf if leaf is None else np.array(leaf), batch)
        for batch in batches
    )


def _numbers(data: Any) -> Iterable[int]:
    """Return the indices of the batches of a `PyDataset`, which may be infinite."""
    try:
        number = data.num_batches
    except NotImplementedError:  # a class without a length
        number = None
    return count() if number is None else range(number)
