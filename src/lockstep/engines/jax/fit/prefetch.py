"""How many batches a thread makes ready."""

import warnings

import keras
import numpy as np
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from lockstep.engines.jax.on_devices.arrays import plain_arrays
from lockstep.engines.jax.steps.input import HostIterator
from lockstep.errors import DataOnHostWarning

UNASKED = 2
"""Batches of arrays that a thread makes ready where nobody has said how many."""
WORTH_IT = 2**20
"""Bytes of a batch: while a device computes, of fewer the caller gathers the rows as fast as it
has them from a thread (docs/performance.md)."""


def unasked(batches: HostIterator) -> int:
    """How many batches a thread makes ready where nobody has said how many.

    Only of NumPy's arrays, whose rows are read and no more: all else makes batches by code that
    could tell.
    """
    adapter = batches.data_adapter
    if type(adapter) is not ArrayDataAdapter or batches.num_batches == 1:
        return 0
    # keras/src/trainers/data_adapters/array_data_adapter.py, ArrayDataAdapter.__init__
    arrays = keras.tree.flatten(adapter._inputs)
    if any(type(array) not in (np.ndarray, np.memmap) for array in arrays):
        return 0
    row = sum(array[:1].nbytes for array in arrays)
    return UNASKED if row * adapter._batch_size >= WORTH_IT else 0


def batches_ahead(wanted: int, batches: HostIterator) -> int:
    """How many batches of the next epoch a thread makes ready before their turn.

    None of data that stay on the devices, which gather them there.
    """
    return 0 if batches.data is not None or _why_left_out(batches) else wanted


def warn_if_left_out(wanted: int, batches: HostIterator) -> None:
    """Say that batches are drawn in their turn although the user wants them before."""
    why = _why_left_out(batches) if wanted else None
    if why is not None:
        warnings.warn(
            f"prefetch={wanted} was asked for, and {why}.\n"
            "Batches are drawn in their turn instead, with the same numbers.",
            DataOnHostWarning,
            stacklevel=5,
        )


def _why_left_out(batches: HostIterator) -> str | None:
    """Why it would be no longer the same if they were drawn before their turn, if it would."""
    adapter = batches.data_adapter
    # keras/src/trainers/data_adapters/array_data_adapter.py, ArrayDataAdapter._get_iterator
    if isinstance(adapter, ArrayDataAdapter) and adapter._shuffle == "batch":
        return "shuffle='batch' draws random numbers for each batch"
    # The order of other arrays is drawn before the first batch.
    if batches.recorded and plain_arrays(adapter) is None:
        return "a Checkpoint saves the position of the batches trained"
    return None
