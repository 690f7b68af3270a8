"""Whether several processes train on the same rows."""

import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from jax.experimental import multihost_utils

from lockstep.errors import ProcessesDisagree

_BYTES = 1 << 16
"""Of an array of a later batch so many bytes are compared, from all over it."""


def check_same(batch: Any, batches: int | None) -> None:
    """Raise where a batch is not the same in every process, by its first 1,024 rows.

    Args:
        batch: A batch of host arrays: the first of an epoch, or the one of a single step.
        batches: How many the epoch has, `None` where that is not known.

    Raises:
        ProcessesDisagree: If the rows, or the number of batches, differ.
    """
    check = zlib.crc32(repr(batches).encode())
    for array in _arrays(batch):
        check = _added(array[: 1 << 10], array, check)
    other = _one_that_differs(check)
    if other is not None:
        raise ProcessesDisagree(
            f"Process {other} has another first batch, or another number of batches, than "
            "process 0: rows would be lost or trained on twice.\n"
            "Give every process the same data in the same order (seed what draws the order), and "
            "the global batch size:\neach process places the rows of its own devices."
        )


class Seen:
    """The batches that an epoch has taken in this process.

    They are compared once, at the end of the epoch: to compare every batch would be another
    message between processes in every step.
    """

    def __init__(self) -> None:
        self._count = 0
        self._check = 0

    def each(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, noted."""
        for batch in batches:
            self._count += 1
            for array in _arrays(batch):
                self._check = _added(_sample(array), array, self._check)
            yield batch

    def check(self) -> None:
        """Raise where another process has taken other batches; begin anew.

        Raises:
            ProcessesDisagree: If that is so.
        """
        check, count = zlib.crc32(repr(self._count).encode(), self._check), self._count
        self._check = self._count = 0
        other = _one_that_differs(check)
        if other is not None:
            raise ProcessesDisagree(
                f"Among the {count} batches of this epoch, process {other} had another one than "
                "process 0: what was trained is not what one device gives.\n"
                "Give every process the same data in the same order (seed what draws it), and go "
                "back to a file of the epoch before."
            )


def _arrays(batch: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in keras.tree.flatten(batch) if leaf is not None]


def _added(part: np.ndarray, array: np.ndarray, check: int) -> int:
    check = zlib.crc32(repr((array.shape, str(array.dtype))).encode(), check)
    if part.dtype.hasobject:  # which no device takes
        return check
    return zlib.crc32(part.tobytes(), check)


def _sample(array: np.ndarray) -> np.ndarray:
    if array.nbytes <= _BYTES:
        return array
    flat = array.reshape(-1)
    step = -(-array.nbytes // _BYTES)
    # An odd distance meets other columns in every row, where their number is a power of two.
    return flat[:: step | 1]


def _one_that_differs(check: int) -> int | None:
    every = multihost_utils.process_allgather(np.array([check], "uint32")).ravel()
    other = np.flatnonzero(every != every[0])
    return int(other[0]) if other.size else None
