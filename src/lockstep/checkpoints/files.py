"""Changes to files, in the few forms that survive a kill at any moment."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

CHUNK = 8 * 2**20
"""Bytes handed to the operating system at once."""


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a new file, and return when the disk has it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in parts:
            _write_all(handle, memoryview(part))
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Return when the disk has what others wrote into a file."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(path: Path) -> None:
    """Return when the disk has the names in a folder, where its file system knows how."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def replace_file(path: Path, content: bytes) -> None:
    """Give a file another content, whole or not at all."""
    aside = path.with_name(f".{path.name}.aside")
    aside.unlink(missing_ok=True)
    write_file(aside, [content])
    os.replace(aside, path)
    sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder that has files and no folders in it."""
    for name in sorted(os.listdir(path)):
        os.unlink(path / name)
    os.rmdir(path)


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data[:CHUNK]) :]
