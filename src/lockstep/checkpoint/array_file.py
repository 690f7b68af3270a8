"""Raw arrays in one file, in the safetensors format.

The file has three parts. Eight bytes have the length of a header, little-endian. The header is
JSON, with the type, the shape and the range of bytes of each name. The bytes of the arrays follow
one after another, in C order, little-endian.

The `safetensors` library reads such files. They are written here as a stream: the host has one
array in memory at a time, and the stream computes the checksums.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lockstep.core.files import CHUNK, write_file
from lockstep.errors import DamagedCheckpoint

_TYPES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


@dataclass(frozen=True)
class Entry:
    """One array: its name, the name of its NumPy type, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def write_arrays(path: Path, entries: list[Entry], arrays: Iterable[np.ndarray]) -> list[int]:
    """Write arrays to a new file, and return when the disk has it.

    Args:
        path: The file; must not exist.
        entries: The descriptions of the arrays, in order.
        arrays: The arrays, taken one at a time.

    Returns:
        The CRC-32 of each array.

    Raises:
        ValueError: If an array differs from its entry, or its type has no name in the format.
    """
    checks: list[int] = []

    def parts() -> Iterator[bytes | memoryview]:
        yield _header(entries)
        for entry, array in zip(entries, arrays, strict=True):
            if array.dtype.name != entry.dtype or array.shape != entry.shape:
                raise ValueError(f"{entry} came as {array.dtype.name} {array.shape}")
            check = 0
            # Checked and written piece by piece, while a piece is in the processor's cache.
            for piece in _pieces(array):
                check = zlib.crc32(piece, check)
                yield piece
            checks.append(check)

    write_file(path, parts())
    return checks


def read_arrays(path: Path, entries: list[Entry], checks: list[int]) -> dict[str, np.ndarray]:
    """Read arrays and check every one of them.

    Raises:
        DamagedCheckpoint: If the file is missing or truncated, or a checksum differs.
    """
    found: dict[str, np.ndarray] = {}
    try:
        with path.open("rb") as file:
            header = _header(entries)
            if file.read(len(header)) != header:
                raise DamagedCheckpoint(f"{path}: the header has changed since it was written.")
            for entry, check in zip(entries, checks, strict=True):
                found[entry.name] = _read(file, path, entry, check)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}.") from error
    return found


def _read(file: BinaryIO, path: Path, entry: Entry, check: int) -> np.ndarray:
    array = np.empty(entry.shape, _numpy_type(entry.dtype))
    found = 0
    for piece in _pieces(array):
        if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
            raise DamagedCheckpoint(f"{path} is truncated in {entry.name!r}.")
        found = zlib.crc32(piece, found)
    if found != check:
        raise DamagedCheckpoint(
            f"{path}: the checksum of {entry.name!r} is {found:08x}, but {check:08x} was written."
        )
    return array


def _pieces(array: np.ndarray) -> Iterator[memoryview]:
    flat = np.ascontiguousarray(array).reshape(-1).view("uint8")
    for start in range(0, flat.size, CHUNK):
        yield flat[start : start + CHUNK].data


def _header(entries: list[Entry]) -> bytes:
    header: dict[str, Any] = {}
    end = 0
    for entry in entries:
        if entry.dtype not in _TYPES:
            raise ValueError(f"{entry.name!r} is {entry.dtype}, which has no name in the format")
        start, end = end, end + _bytes(entry)
        header[entry.name] = {
            "dtype": _TYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(entry: Entry) -> int:
    return int(np.prod(entry.shape, dtype="int64")) * _numpy_type(entry.dtype).itemsize


def _numpy_type(name: str) -> np.dtype[Any]:
    if name.startswith(("bfloat16", "float8")):
        import ml_dtypes  # comes with JAX

        other: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return other
    return np.dtype(name)
