"""Arrays moved from file to file, piece by piece, and compared the same way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.rescue import blank, hdf5
from lockstep.rescue.cudnn import Convert
from lockstep.rescue.keras2 import Stored

PIECE = 2**20
"""Bytes of an array in memory at a time, where it needs no conversion; larger is slower."""


def copy(stored: Stored, convert: Convert | None, group: Any, path: str) -> None:
    """Write an array at `path`, with its own dtype."""
    blank.require_wanted()
    if convert is not None:
        group.create_dataset(path, data=convert(stored.read()))
        return
    target = group.create_dataset(path, shape=stored.shape, dtype=stored.data.dtype)
    if not stored.shape:
        target[()] = stored.read()
        return
    for piece in _slices(stored):
        target[piece] = _read(stored, piece)


def fill(shape: tuple[int, ...], number: Any, group: Any, path: str) -> None:
    """Write one number everywhere, as a new optimizer has it, a piece at a time."""
    import numpy as np

    if not shape:
        group[path] = number
        return
    target = group.create_dataset(path, shape=shape, dtype=number.dtype)
    for piece in _cuts(shape, number.dtype.itemsize):
        target[piece] = np.full((piece.stop - piece.start, *shape[1:]), number)


def equal(stored: Stored, convert: Convert | None, written: Any) -> bool:
    """Whether an array that was read back is bit for bit what the old file holds."""
    blank.require_wanted()
    if convert is not None:
        values = convert(stored.read())
        return _same(values, written[()])
    if tuple(written.shape) != stored.shape or written.dtype != stored.data.dtype:
        return False
    if not stored.shape:
        return _same(stored.read(), written[()])
    return all(_same(_read(stored, piece), written[piece]) for piece in _slices(stored))


def pieces(stored: Stored) -> Iterator[Any]:
    """The numbers of an array in order, a piece at a time."""
    if not stored.shape:
        yield stored.read()
        return
    for piece in _slices(stored):
        yield _read(stored, piece)


def _read(stored: Stored, piece: slice) -> Any:
    blank.require_wanted()
    with hdf5.reading(stored.data.file.filename):
        return stored.data[piece]


def value(stored: Stored, convert: Convert | None) -> Any:
    """The numbers as the new model takes them."""
    found = stored.read()
    return found if convert is None else convert(found)


def holds(variable: Any, stored: Stored, convert: Convert | None) -> bool:
    """Whether a variable holds exactly what the file does."""
    wanted = value(stored, convert)
    found = blank.numbers(variable)
    return bool(_same(wanted.astype(found.dtype), found))


def _slices(stored: Stored) -> Iterator[slice]:
    return _cuts(stored.shape, stored.data.dtype.itemsize)


def _cuts(shape: tuple[int, ...], row: int) -> Iterator[slice]:
    """Slices of the first dim, each of about PIECE bytes."""
    for length in shape[1:]:
        row *= length
    step = max(PIECE // max(row, 1), 1)
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def _same(one: Any, other: Any) -> bool:
    import numpy as np

    one, other = np.asarray(one), np.asarray(other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    # Bits, so that NaN equals itself and -0.0 is not 0.0.
    kind = {2: "u2", 4: "u4", 8: "u8"}.get(one.dtype.itemsize)
    if kind is None or not one.shape:
        return bool(one.tobytes() == other.tobytes())
    flat = np.ascontiguousarray(one).view(kind), np.ascontiguousarray(other).view(kind)
    return bool(np.array_equal(*flat))
