"""Arrays alone, under their names: `.safetensors`, or an HDF5 of named arrays.

For weights whose architecture nobody has: every array under the name that it had,
readable by anything.
"""

from __future__ import annotations

import json
from typing import Any

from lockstep.errors import UnsuitableOutput
from lockstep.rescue import hdf5, stream
from lockstep.rescue.keras2 import OldFile, Stored
from lockstep.rescue.modern import require_equal
from lockstep.rescue.report import Row

_KINDS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32",
    "uint64": "U64", "bool": "BOOL",
}  # fmt: skip


def arrays(old: OldFile) -> dict[str, Stored]:
    """Every array under a name of its own.

    The name is the weight's own (`dense_1/kernel`); where two layers of a file use
    one name, it is preceded by the layer's group.
    """
    old.require_whole()
    groups = old.weighted
    plain = [_bare(stored.name) for group in groups for stored in group.weights]
    unique = len(set(plain)) == len(plain)
    return {
        _bare(stored.name) if unique else f"{group.name}/{_bare(stored.name)}": stored
        for group in groups
        for stored in group.weights
    }


def write_safetensors(found: dict[str, Stored], path: str) -> list[Row]:
    """Write a `.safetensors` file, streamed, and read it back."""
    import numpy as np

    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    places: dict[str, int] = {}
    offset = 0
    for name, stored in found.items():
        size = stored.data.dtype.itemsize * int(np.prod(stored.shape, dtype=np.int64))
        kind = _KINDS.get(np.dtype(stored.data.dtype).name)
        if kind is None:
            raise UnsuitableOutput(
                f"{name} is {stored.dtype}, which safetensors does not hold.\n"
                "Write a .weights.h5 instead."
            )
        header[name] = {
            "dtype": kind,
            "shape": list(stored.shape),
            "data_offsets": [offset, offset + size],
        }
        places[name] = offset
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for stored in found.values():
            for piece in stream.pieces(stored):
                file.write(_little(piece).tobytes())
    rows = []
    base = 8 + len(text)
    with open(path, "rb") as file:
        for name, stored in found.items():
            file.seek(base + places[name])
            same = all(
                file.read(values.nbytes) == _little(values).tobytes()
                for values in stream.pieces(stored)
            )
            rows.append(Row(stored.path.lstrip("/"), name, stored.shape, same))
    require_equal(rows)
    return rows


def write_hdf5(found: dict[str, Stored], old: OldFile, path: str) -> list[Row]:
    """Write an HDF5 file of named arrays, streamed, and read it back."""
    import h5py

    with h5py.File(path, "w") as handle:
        handle.attrs["format"] = "named arrays"
        handle.attrs["keras_version"] = (old.version or "").encode()
        hdf5.write_names(handle, "array_names", list(found))
        for name, stored in found.items():
            stream.copy(stored, None, handle, name)
    with h5py.File(path, "r") as handle:
        rows = [
            Row(
                stored.path.lstrip("/"),
                name,
                stored.shape,
                stream.equal(stored, None, handle[name]),
            )
            for name, stored in found.items()
        ]
    require_equal(rows)
    return rows


def _bare(name: str) -> str:
    return name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name


def _little(values: Any) -> Any:
    return values.astype(values.dtype.newbyteorder("<"), copy=False)
