"""Read HDF5 files of unknown origin within limits.

Every group, attribute and array of an old file is read through this module. It follows
hard links only, and checks the declared size of an object before it reads the object.

The HDF5 library itself can loop or crash on damaged files. A separate process, with
limits on time and memory, first walks the structure of each file. Only files that this
process survives are opened.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from lockstep.errors import HostileFile, OldFileError, UnreadableFile

ATTRIBUTE_CAP = 64 * 2**20
"""Maximum bytes of one attribute; the largest known config has 3 MB."""

NAMES_CAP = 50_000
"""Maximum number of names in one list of a file."""

UNFOLD_CAP = 256 * 2**20
"""Maximum bytes of a file's arrays, or 32 times the file size where that is more."""

PROBE_SECONDS = 5
"""Processor time of the probe process; a file of 50,000 arrays takes about 3 seconds."""

PROBE_WALL_SECONDS = 20 * PROBE_SECONDS
"""Wall time of the probe process, which a busy machine stretches."""

PROBE_MEMORY = 2**30
"""Address space of the probe process (Linux)."""

_CHUNK = 64_512  # bytes of an attribute that fit in HDF5's object header
_DEFLATE_RATIO = 1032  # maximum compression of deflate
_SHUFFLE, _DEFLATE, _CHECKSUM, _LZF = 2, 1, 3, 32000  # filter numbers in HDF5
_survived: dict[tuple[str, int, int], None] = {}


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """Open an HDF5 file for reading; raise UnreadableFile where HDF5 fails."""
    require_survival(path)
    with reading(path):
        handle = h5py.File(path, "r", locking=False)
    with handle:
        yield handle


@contextmanager
def inside_archive(path: str) -> Iterator[Any]:
    """Open the HDF5 file inside a `.keras` archive in place, without a copy."""
    name = "model.weights.h5"
    with open(path, "rb", buffering=0) as file:
        with zipfile.ZipFile(file) as archive:
            info = archive.getinfo(name)
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{name} is compressed inside the archive")
            file.seek(info.header_offset + 26)
            lengths = [int.from_bytes(file.read(2), "little") for _ in range(2)]
        with h5py.File(_Window(file, info.header_offset + 30 + sum(lengths), info.file_size)) as h5:
            yield h5


class _Window(io.RawIOBase):
    """A readable file object for a part of an open file."""

    def __init__(self, file: Any, start: int, size: int) -> None:
        super().__init__()
        self._file, self._start, self._size, self._at = file, start, size, 0

    # Methods of io.RawIOBase.

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_CUR: self._at, io.SEEK_END: self._size}.get(whence, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._file.seek(self._start + self._at)
        count = int(self._file.readinto(view[: max(self._size - self._at, 0)]))
        self._at += count
        return count


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise every failure of HDF5 in the body as an UnreadableFile."""
    try:
        yield
    except OldFileError:
        raise
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, MemoryError,
            OverflowError) as error:  # fmt: skip
        reason = (str(error).splitlines() or [type(error).__name__])[0].strip("'\"")[:160]
        raise UnreadableFile(
            f"{name} cannot be read as HDF5: {reason}.\nIt is damaged, truncated or not an HDF5 "
            "file; copy it again from the\noriginal location, or use an earlier checkpoint."
        ) from error


def child(group: Any, name: str) -> Any:
    """Return the group or array at `name`, or None; only hard links are followed."""
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
                f"{here.file.filename}: {part!r} is a {kind}, which points outside of the file "
                "structure.\nKeras never writes such links, so it is not followed; this file "
                "was not written by Keras."
            )
        here = here[part]
    return here


def array(group: Any, name: str) -> Any:
    """Return the array at `name` after a check, or None where there is none."""
    found = child(group, name)
    if not isinstance(found, h5py.Dataset):
        return None
    check_array(found)
    return found


def text(thing: Any, name: str) -> str | None:
    """Return the attribute `name` as text, or None where there is none."""
    value = _attribute(thing, name)
    return value.decode() if isinstance(value, bytes) else value if value is None else str(value)


def names(thing: Any, name: str) -> list[str] | None:
    """Return the list of names in the attribute `name`, joined from its chunks if any.

    Keras 2.1.5 and later split a list above 64,512 bytes into `name0`, `name1`, ...
    """
    whole = _attribute(thing, name)
    if whole is not None:
        return _as_names(thing, whole)
    found: list[str] = []
    chunk = 0
    while (part := _attribute(thing, f"{name}{chunk}")) is not None:
        found += _as_names(thing, part)
        require_few_names(thing, len(found))
        chunk += 1
    return found if chunk else None


def write_names(thing: Any, key: str, names: list[str]) -> None:
    """Write a list of names as an attribute, in chunks where it is too long for one."""
    encoded = np.asarray([name.encode() for name in names] or [], dtype="S" if names else float)
    per_chunk = max(_CHUNK // encoded.itemsize, 1)
    if len(encoded) <= per_chunk:
        thing.attrs[key] = encoded
        return
    for number, start in enumerate(range(0, len(encoded), per_chunk)):
        thing.attrs[f"{key}{number}"] = encoded[start : start + per_chunk]


def check_array(dataset: Any) -> None:
    """Refuse an array with a false size or no numbers, before its data are read."""
    declared = math.prod(map(int, dataset.shape), start=int(dataset.dtype.itemsize))
    stored = int(dataset.id.get_storage_size())
    where = f"{dataset.file.filename}: the array {dataset.name}"
    if dataset.external or dataset.is_virtual:
        raise HostileFile(
            f"{where} stores its values in an external file.\n"
            "Keras never writes such files, so the reference is not followed."
        )
    if dataset.dtype.kind not in "fiub":
        raise HostileFile(
            f"{where} holds {dataset.dtype} instead of numbers.\n"
            "Keras never writes such files; this file was not written by Keras."
        )
    honest = stored == declared if dataset.chunks is None else _unfolds(dataset, stored, declared)
    if not honest:
        raise HostileFile(
            f"{where} declares {declared:,} bytes and stores {stored:,}.\n"
            "The file is damaged, or was crafted to exhaust memory, so it is not read."
        )


def require_modest(path: str, sizes: Iterable[int]) -> None:
    """Refuse a file whose arrays are far larger than the file."""
    total = sum(sizes)
    if total > _room(path):
        raise HostileFile(
            f"{path} has {os.path.getsize(path):,} bytes, and its arrays declare {total:,}.\n"
            "The file is damaged, or was crafted to exhaust memory, so it is not read."
        )


def _room(path: str) -> int:
    """Return the maximum bytes of the arrays of a file."""
    return max(UNFOLD_CAP, 32 * os.path.getsize(path))


def _unfolds(dataset: Any, stored: int, declared: int) -> bool:
    """Return whether every chunk of an array unpacks to at most its declared size."""
    if declared > min(stored * _DEFLATE_RATIO, _room(dataset.file.filename)):
        return False
    plan = dataset.id.get_create_plist()
    filters = [plan.get_filter(number)[0] for number in range(plan.get_nfilters())]
    if len(set(filters)) < len(filters) or set(filters) - {_SHUFFLE, _DEFLATE, _CHECKSUM, _LZF}:
        raise HostileFile(
            f"{dataset.file.filename}: the array {dataset.name} is stored with filters that "
            "Keras does not use.\n"
            "Unpack it: h5repack -f NONE old.h5 new.h5"
        )
    chunk = math.prod(map(int, dataset.chunks), start=int(dataset.dtype.itemsize))
    if chunk > max(UNFOLD_CAP, 2 * declared):
        return False
    found: list[Any] = []
    if _DEFLATE in filters:
        dataset.id.chunk_iter(found.append)
    for one in found:
        if one.size * _DEFLATE_RATIO <= UNFOLD_CAP or one.filter_mask:
            continue
        # HDF5 unpacks the whole chunk and ignores its declared size.
        inflate = zlib.decompressobj()
        _, rest = dataset.id.read_direct_chunk(one.chunk_offset)
        size = 0
        with contextlib.suppress(zlib.error):  # reading the array raises this error
            while rest and size <= chunk:
                size += len(inflate.decompress(rest, 2**20))
                rest = inflate.unconsumed_tail
        if size > chunk:
            return False
    return True


def _attribute(thing: Any, name: str) -> Any:
    if name not in thing.attrs:
        return None
    count, size = _extent(thing, name)
    if size > ATTRIBUTE_CAP or count > NAMES_CAP:
        raise HostileFile(
            f"{thing.file.filename}: the attribute {name!r} declares {count:,} entries.\n"
            f"At most {ATTRIBUTE_CAP:,} bytes are read; the file is damaged or malicious."
        )
    return thing.attrs[name]


def _extent(thing: Any, name: str) -> tuple[int, int]:
    """Return the entries and bytes of an attribute; only references to long text count."""
    attribute = thing.attrs.get_id(name)
    count = math.prod(map(int, attribute.shape))
    return count, count * int(attribute.dtype.itemsize)


def _as_names(thing: Any, value: Any) -> list[str]:
    entries = np.asarray(value).ravel()
    if entries.dtype.kind == "f" and entries.size == 0:
        return []  # an empty list is stored as floats
    if entries.dtype.kind not in "SUO":
        raise UnreadableFile(
            f"{thing.file.filename}: a list of names in {thing.name} holds {entries.dtype}.\n"
            "The file is damaged; copy it again from the original location."
        )
    return [e.decode("utf-8") if isinstance(e, bytes) else str(e) for e in entries.tolist()]


def require_few_names(thing: Any, count: int) -> None:
    """Refuse a list of more than NAMES_CAP names."""
    if count > NAMES_CAP:
        raise HostileFile(
            f"{thing.file.filename}: {thing.name} lists {count:,} names, more than "
            f"{NAMES_CAP:,}.\nNo model has that many; the file is damaged or malicious."
        )


def require_survival(path: str) -> None:
    """Refuse a file on which HDF5 crashes, hangs or runs out of memory.

    A separate process walks the structure of the file first.
    """
    try:
        state = os.stat(path)
    except OSError:
        return  # opening it raises the error
    key = (os.path.realpath(path), state.st_mtime_ns, state.st_size)
    if key in _survived:
        return
    root = str(Path(__file__).parents[2])
    script = f"import sys; sys.path.append({root!r}); from {__name__} import _probe; _probe()"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", script, path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_WALL_SECONDS,
            check=False,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "LOCKSTEP_REHEARSE": ""},
        )
        status, said = done.returncode, done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired:
        status, said = -_SIGXCPU, ""
    if status == _REFUSED:
        raise HostileFile(
            f"{path}: {said}.\nKeras never writes such files; this file was not written by Keras."
        )
    if status:
        ends = f"fails with status {status}"
        if status == -_SIGXCPU:
            ends = f"does not end within {PROBE_SECONDS} s"
        raise HostileFile(
            f"{path}: reading its structure in a separate process {ends}.\n"
            "It is damaged in a way that crashes the HDF5 library, or it is malicious.\n"
            "Copy it again from the original location, or use an earlier checkpoint."
        )
    while len(_survived) > 100:
        del _survived[next(iter(_survived))]
    _survived[key] = None


_REFUSED, _SIGXCPU = 3, 24
_READ = ("_names", "_config", "keras_version", "backend")
"""Substrings in the names of attributes that are read."""


def _probe() -> None:
    """Walk the structure of the file in `sys.argv[1]`, in a separate process."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no limits
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (PROBE_SECONDS, PROBE_SECONDS + 1))
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_AS, (PROBE_MEMORY, PROBE_MEMORY))
    path = sys.argv[1]
    archive = zipfile.is_zipfile(path)
    with (
        contextlib.suppress(Exception),
        inside_archive(path) if archive else h5py.File(path, "r", locking=False) as handle,
    ):
        _walk(handle)
    os._exit(0)


def _refuse(why: str) -> None:
    sys.stdout.write(why)
    sys.stdout.flush()
    os._exit(_REFUSED)


def _walk(handle: Any) -> None:
    """Read all structure that a rescue may read; exceptions are left for the rescue to raise."""
    seen: set[Any] = set()
    stack: list[Any] = [handle]
    while stack:
        thing = stack.pop()
        with contextlib.suppress(Exception):
            token = h5py.h5o.get_info(thing.id)
            if (token.fileno, token.addr) in seen:
                _refuse(f"it holds {thing.name!r} under two names")
            seen.add((token.fileno, token.addr))
        with contextlib.suppress(Exception):
            for name in thing.attrs:
                if any(part in name for part in _READ):
                    with contextlib.suppress(Exception):
                        _touch(thing, name)
        with contextlib.suppress(Exception):
            if isinstance(thing, h5py.Dataset):
                _ = thing.shape, thing.dtype, thing.id.get_storage_size(), thing.external
                if thing.chunks is not None and not thing.is_virtual:
                    thing.id.chunk_iter(lambda chunk: None)
        if isinstance(thing, h5py.Group):
            with contextlib.suppress(Exception):
                for name in thing:
                    with contextlib.suppress(Exception):
                        if isinstance(thing.get(name, getlink=True), h5py.HardLink):
                            stack.append(thing[name])


def _touch(thing: Any, name: str) -> None:
    """Read an attribute; its variable-length entries may all refer to one large object."""
    count, size = _extent(thing, name)
    if size > ATTRIBUTE_CAP or count > NAMES_CAP:
        return
    if count == 1 or not thing.attrs.get_id(name).dtype.hasobject:
        _ = thing.attrs[name]
        return
    try:
        large = sum(len(one) for one in thing.attrs[name].ravel()) > ATTRIBUTE_CAP
    except (MemoryError, OSError):
        large = True
    if large:
        _refuse(f"the attribute {name!r} decompresses to more than {ATTRIBUTE_CAP:,} bytes")
