"""A damaged file is first walked by another process, which may crash or hang.

The HDF5 library itself can loop or crash on damaged files. So before a file is
opened here, a small process of its own, with limits on time and memory, does what
this one is about to do: it follows every hard link, and reads every attribute and
every array's description. Only files that it survives are opened.

Run as a script, this file is that process; it imports nothing of lockstep.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

SECONDS = 30
"""Time that a file's structure may take; one of 200,000 arrays takes about 20."""

MEMORY = 4 * 2**30
"""Address space of the probing process (Linux); what it cannot walk in that is refused."""

_ATTRIBUTE_CAP = 64 * 2**20
_survived: dict[tuple[str, int, int], None] = {}


def require_survival(path: str) -> None:
    """Raise HostileFile where HDF5 crashes, hangs or runs out of memory on a file."""
    from lockstep.errors import HostileFile

    try:
        state = os.stat(path)
    except OSError:
        return  # opening it will say what is wrong
    key = (os.path.realpath(path), state.st_mtime_ns, state.st_size)
    if key in _survived:
        return
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__, path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
        what = f"stops with status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        what = f"does not end within {SECONDS} s"
    if what:
        raise HostileFile(
            f"{path}: reading its structure {what}, in a process apart.\n"
            "It is damaged in a way that the HDF5 library does not survive, or was made to "
            "harm.\nCopy it again from where it was written, or use an earlier checkpoint."
        )
    while len(_survived) > 100:
        del _survived[next(iter(_survived))]
    _survived[key] = None


def _limit() -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _walk(handle: Any, size: int) -> None:
    """Touch everything that the rescue may touch; failures are found again over there."""
    import h5py

    seen: set[Any] = set()
    stack: list[Any] = [handle]
    while stack:
        thing = stack.pop()
        with contextlib.suppress(Exception):
            token = h5py.h5o.get_info(thing.id)
            if (token.fileno, token.addr) in seen:
                continue
            seen.add((token.fileno, token.addr))
        with contextlib.suppress(Exception):
            for name in thing.attrs:
                with contextlib.suppress(Exception):
                    _attribute(thing, name, size)
        with contextlib.suppress(Exception):
            if isinstance(thing, h5py.Dataset):
                _ = thing.shape, thing.dtype, thing.id.get_storage_size(), thing.external
                declared = thing.dtype.itemsize * thing.size
                honest = declared <= min(thing.id.get_storage_size() * 1032, MEMORY)
                if honest and thing.chunks is not None and not thing.is_virtual:
                    for piece in thing.iter_chunks():
                        _ = thing[piece]
        if isinstance(thing, h5py.Group):
            with contextlib.suppress(Exception):
                for name in thing:
                    with contextlib.suppress(Exception):
                        if isinstance(thing.get(name, getlink=True), h5py.HardLink):
                            stack.append(thing[name])


def _attribute(thing: Any, name: str, size: int) -> None:
    found = thing.attrs.get_id(name)
    count = 1
    for length in found.shape:
        count *= int(length)
    large = count * int(found.dtype.itemsize)
    if found.dtype.hasobject and count > 1:
        large = count * size
    if large <= _ATTRIBUTE_CAP:
        _ = thing.attrs[name]


def _main(path: str) -> None:
    import zipfile

    import h5py

    _limit()
    size = os.path.getsize(path)
    with contextlib.suppress(Exception):
        if zipfile.is_zipfile(path):
            with (
                zipfile.ZipFile(path) as archive,
                archive.open("model.weights.h5") as inner,
                h5py.File(inner, "r") as handle,
            ):
                _walk(handle, size)
        else:
            with h5py.File(path, "r", locking=False) as handle:
                _walk(handle, size)
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1])
