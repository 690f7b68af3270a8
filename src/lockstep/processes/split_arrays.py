"""The same arrays on a disk in all processes, of which each reads its rows alone."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from lockstep.core.devices import shard_rows
from lockstep.core.process_local import ProcessLocal
from lockstep.errors import UnusableData
from lockstep.keras_compat import get_data_adapter, row_indices
from lockstep.processes.coordination import digest
from lockstep.processes.group import current
from lockstep.processes.own_rows import check_class_weight
from lockstep.processes.split_reading import SplitRows


class SplitArrays(SplitRows):
    """Global batches of HDF5 data sets, memory maps or other arrays, read in parts.

    Keras cuts the numbers of the rows into batches, in the order that it would give the rows.
    """

    _why_other = "the arrays of the processes differ.\nUse the same files in every process."

    def _adapter_of(self, own: ProcessLocal, given: dict[str, Any]) -> Any:
        check_class_weight(given)
        self._arrays = keras.utils.pack_x_y_sample_weight(*own.parts)
        self._is_checked = False
        self._first: np.ndarray | None = None
        rows = {int(each.shape[0]) for each in keras.tree.flatten(self._arrays) if each is not None}
        if len(rows) != 1:
            raise UnusableData(
                f"split_reading was given arrays of {sorted(rows)} rows.\n"
                "Use the same number of rows in each: every row of x belongs to a row of y."
            )
        names = ("batch_size", "steps_per_epoch", "shuffle")
        more = {name: given[name] for name in names if name in given}
        return get_data_adapter(x=np.arange(rows.pop()), **more)

    def _next(self, batches: Iterator[tuple[Any, str]]) -> tuple[Any, str]:
        # The order is drawn from the random numbers of the process, which are the same in all.
        return next(batches, (None, ""))

    def _new_pass(self) -> Iterator[tuple[Any, str]]:
        return self._in_order(row_indices(self.adapter))

    def _begin_pass(self) -> None:
        """Draw nothing: the order is drawn where Keras draws it."""

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Begin a pass, in the order that PyTorch draws for arrays."""
        return self._joined(self._in_order(iter(self.adapter.get_torch_dataloader())))

    def _in_order(self, batches: Iterator[Any]) -> Iterator[tuple[Any, str]]:
        """Yield the rows of this process in each global batch, `None` where it has none."""
        rank, size = current().rank, current().size
        self._first = None
        for drawn in batches:
            rows = np.arange(drawn.start, drawn.stop) if isinstance(drawn, slice) else drawn
            rows = np.asarray(rows)
            self._first = rows if self._first is None else self._first
            part = shard_rows(len(rows), size)[rank]
            mine = rows[part.start : part.stop]
            yield self._read(mine) if len(mine) else None, digest([rows.astype("int64").tobytes()])

    def _first_whole(self) -> Any:
        assert self._first is not None  # a batch was drawn
        return self._read(self._first)

    def _read(self, rows: np.ndarray) -> Any:
        return keras.tree.map_structure(
            lambda array: None if array is None else read_rows(array, rows), self._arrays
        )


def read_rows(array: Any, rows: np.ndarray) -> np.ndarray:
    """Return rows of an array on a disk, in the float type of Keras.

    Args:
        array: An HDF5 data set, for example, which takes ascending rows alone.
        rows: Their numbers, each once.
    """
    order = np.argsort(rows)
    first, last = int(rows[order[0]]), int(rows[order[-1]])
    follow = last - first + 1 == len(rows)
    found = np.asarray(array[first : last + 1] if follow else array[rows[order]])
    # keras/src/trainers/data_adapters/array_slicing.py, convert_to_sliceable
    is_float = found.dtype.kind == "f" or found.dtype.name == "bfloat16"
    read = np.empty(found.shape, keras.config.floatx() if is_float else found.dtype)
    read[order] = found
    return read
