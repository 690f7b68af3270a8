"""Files that are complete or absent, also after a kill or a loss of power at any moment."""

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.errors import LockstepError, shown

CHUNK = 8 * 2**20
"""Bytes handed to the operating system at once."""

_PREFIX, _RANDOM = ".saving-", 8
"""The start of a temporary name, and the number of random characters that follow."""
_IN_USE = 3600.0
"""Seconds since the last write to a temporary file in which a process may still need it."""


def path_text(value: object, argument: str, refused: type[LockstepError]) -> str:
    """Return a path as text.

    Args:
        value: What was given: a `str`, `bytes`, or an object with `__fspath__`.
        argument: The name of the argument, for the message.
        refused: The error for any other value.
    """
    try:
        return os.fsdecode(value)  # type: ignore[arg-type]
    except TypeError:
        raise refused(
            f"{argument}={shown(value)} was given, but a path was expected.\n"
            "Pass a str or a pathlib.Path."
        ) from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder; its file replaces `path` when the body succeeds.

    At every moment `path` has its old content or the new one, also if several processes replace
    it at once. When this returns, the disk has the new one. If the body raises, the temporary
    file is removed. One that a kill has left is removed by a replacement an hour later. Its name
    ends with that of `path`: Keras chooses a format by the suffix.

    Args:
        path: The file to replace or create. Its folder must exist.

    Raises:
        OSError: If the folder does not take the file.

    Example:
        >>> with replacing(Path("results.json")) as temporary:
        ...     temporary.write_text("{}")
    """
    _remove_left_over(path)
    temporary = path.with_name(f"{_PREFIX}{secrets.token_hex(_RANDOM // 2)}-{path.name}")
    try:
        yield temporary
        sync_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def is_temporary(name: str, path: Path) -> bool:
    """Return whether a file of this name is one under which `replacing` writes `path`."""
    return name.startswith(_PREFIX) and name[len(_PREFIX) + _RANDOM :] == f"-{path.name}"


def _remove_left_over(path: Path) -> None:
    with contextlib.suppress(OSError):  # another process may remove it too
        for file in path.parent.iterdir():
            if is_temporary(file.name, path) and time.time() - file.stat().st_mtime > _IN_USE:
                file.unlink()


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
