"""HDF5 from strangers, read within limits.

Every group, attribute and array of an old file is reached through this file. It
follows hard links only, and looks at the declared size of a thing before it
reads it, so that a small file cannot ask for a large memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.errors import HostileFile, OldFileError, UnreadableFile
from lockstep.rescue import probe

ATTRIBUTE_CAP = 64 * 2**20
"""Bytes that one attribute may hold; the largest config seen in the wild is 3 MB."""

NAMES_CAP = 200_000
"""Names that one list in a file may have."""

MAPPED_CAP = 4 * 2**30
"""Bytes that one *compressed* array may unfold to; a plain one is as large as it lies."""

_CHUNK = 64_512  # bytes of an attribute that HDF5's object header takes
_DEFLATE_RATIO = 1032  # the most that deflate can shrink


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open an HDF5 file for reading; what HDF5 cannot open is an UnreadableFile."""
    import h5py

    name = os.fspath(path)
    probe.require_survival(name)
    with reading(name):
        handle = h5py.File(name, "r", locking=False)
    try:
        yield handle
    finally:
        handle.close()


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Tell every failure of HDF5 in the body as an UnreadableFile."""
    try:
        yield
    except OldFileError:
        raise
    except FileNotFoundError as error:
        raise UnreadableFile(f"{name} is not there.\nGive the path of the file to read.") from error
    except (
        OSError,
        RuntimeError,
        KeyError,
        ValueError,  # text that is no text among them
        TypeError,
        MemoryError,
        OverflowError,
    ) as error:
        raise UnreadableFile(
            f"{name} cannot be read as HDF5: {_short(error)}.\n"
            "It is damaged, cut short or of another kind; copy it again from where it was\n"
            "written, or use an earlier checkpoint."
        ) from error


def child(group: Any, name: str) -> Any:
    """The group or array at `name`, or None; only hard links are followed."""
    import h5py

    here = group
    for part in name.split("/"):
        if part in ("", "."):
            continue
        if not isinstance(here, h5py.Group) or part == ".." or part not in here:
            return None
        link = here.get(part, getlink=True)
        if not isinstance(link, h5py.HardLink):
            kind = type(link).__name__
            raise HostileFile(
                f"{here.file.filename}: {part!r} is a {kind}, which points elsewhere.\n"
                "Keras never wrote one, so it is not followed; the file was made by other means."
            )
        here = here[part]
    return here


def children(group: Any) -> list[str]:
    """Names in a group, at most NAMES_CAP of them."""
    if len(group) > NAMES_CAP:
        raise _too_many(group, len(group))
    return [str(name) for name in group]


def text(thing: Any, name: str) -> str | None:
    """The attribute `name` as text, or None where there is none."""
    value = _attribute(thing, name)
    if value is None:
        return None
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="strict")
    return value if isinstance(value, str) else str(value)


def names(thing: Any, name: str) -> list[str] | None:
    """A list of names in the attribute `name`, joined where it was written in chunks.

    Keras 2.1.5 and later split a list above 64,512 bytes into `name0`, `name1`, ...
    """
    whole = _attribute(thing, name)
    if whole is not None:
        return _as_names(thing, whole)
    found: list[str] = []
    chunk = 0
    while (part := _attribute(thing, f"{name}{chunk}")) is not None:
        found += _as_names(thing, part)
        if len(found) > NAMES_CAP:
            raise _too_many(thing, len(found))
        chunk += 1
    return found if chunk else None


def write_names(thing: Any, key: str, names: list[str]) -> None:
    """A list of names as an attribute, in chunks where it is too long for one."""
    import numpy as np

    encoded = [name.encode() for name in names]
    width = max((len(name) for name in encoded), default=1)
    per_chunk = max(_CHUNK // max(width, 1), 1)
    if len(encoded) <= per_chunk:
        thing.attrs[key] = np.asarray(encoded, dtype=f"S{width}") if encoded else []
        return
    for number, start in enumerate(range(0, len(encoded), per_chunk)):
        thing.attrs[f"{key}{number}"] = np.asarray(encoded[start : start + per_chunk])


def check_array(dataset: Any) -> None:
    """Refuse an array that is not what it declares to be, before a byte is read."""
    declared = int(dataset.dtype.itemsize)
    for length in dataset.shape:
        declared *= int(length)
    stored = int(dataset.id.get_storage_size())
    where = f"{dataset.file.filename}: the array {dataset.name}"
    if dataset.external or dataset.is_virtual:
        raise HostileFile(
            f"{where} keeps its numbers in another file.\n"
            "Keras never wrote one like that, so it is not followed."
        )
    if dataset.dtype.kind not in "fiub":
        raise HostileFile(
            f"{where} holds {dataset.dtype}, no numbers.\n"
            "Keras never wrote one like that; the file was made by other means."
        )
    if dataset.chunks is None:
        honest = stored == declared
    else:
        honest = declared <= min(stored * _DEFLATE_RATIO, MAPPED_CAP)
    if not honest:
        raise HostileFile(
            f"{where} declares {declared:,} bytes and stores {stored:,}.\n"
            "The file is damaged, or was made to fill the memory; it is not read."
        )


def _attribute(thing: Any, name: str) -> Any:
    if name not in thing.attrs:
        return None
    attribute = thing.attrs.get_id(name)
    count = 1
    for length in attribute.shape:
        count *= int(length)
    size = count * int(attribute.dtype.itemsize)
    if attribute.dtype.hasobject and count > 1:
        # Text of variable length: each entry may repeat one large piece of the file.
        size = count * os.path.getsize(thing.file.filename)
    if size > ATTRIBUTE_CAP or count > NAMES_CAP:
        raise HostileFile(
            f"{thing.file.filename}: the attribute {name!r} declares {count:,} entries.\n"
            f"At most {ATTRIBUTE_CAP:,} bytes are read; the file is damaged or made to harm."
        )
    return thing.attrs[name]


def _as_names(thing: Any, value: Any) -> list[str]:
    import numpy as np

    entries = np.asarray(value).ravel()
    if entries.dtype.kind == "f" and entries.size == 0:
        return []  # an empty list has no type of its own
    if entries.dtype.kind not in "SUO":
        raise UnreadableFile(
            f"{thing.file.filename}: a list of names in {thing.name} holds {entries.dtype}.\n"
            "The file is damaged; copy it again from where it was written."
        )
    return [e.decode("utf-8") if isinstance(e, bytes) else str(e) for e in entries.tolist()]


def _too_many(thing: Any, count: int) -> HostileFile:
    return HostileFile(
        f"{thing.file.filename}: {thing.name} lists {count:,} names, more than {NAMES_CAP:,}.\n"
        "No model has that many; the file is damaged or made to harm."
    )


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].strip("'\"")[:160]
