"""Files that are complete or absent, also after a kill or a loss of power at any moment."""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

CHUNK = 8 * 2**20
"""Bytes handed to the operating system at once."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder; its file replaces `path` when the body succeeds.

    At every moment `path` has its old content or the new one. When this returns, the disk has
    the new one. If the body raises, the temporary file is removed. One that a kill has left is
    removed by the next replacement: its name depends on `path` alone. It has the suffix of
    `path`, by which Keras chooses a format.

    Args:
        path: The file to replace or create. Its folder must exist.

    Raises:
        OSError: If the folder does not take the file.

    Example:
        >>> with replacing(Path("results.json")) as temporary:
        ...     temporary.write_text("{}")
    """
    temporary = temporary_name(path)
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        sync_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def temporary_name(path: Path) -> Path:
    """The name under which `replacing` writes a file."""
    return path.with_name(f".saving-{path.name}")


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
    """Return when the disk has the content of a file."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(path: Path) -> None:
    """Return when the disk has the names in a folder, if its file system can sync folders."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def remove_folder(path: Path) -> None:
    """Remove a folder that has files and no folders in it."""
    for name in sorted(os.listdir(path)):
        os.unlink(path / name)
    os.rmdir(path)


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data[:CHUNK]) :]
