"""A lock, so that one `fit` at a time writes into the folder of a run."""

import contextlib
import errno
import functools
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.errors import CheckpointError, LockstepError

if sys.platform != "win32":
    import fcntl

FILE = "lockstep.lock"

_writers: dict[tuple[int, str], object] = {}
"""The process and the folder of each writer. A fork inherits those of its parent."""


Refused = Callable[[str], LockstepError]
"""Returns the error for a folder into which somebody else writes, given who."""


@contextlib.contextmanager
def only_writer(folder: Path, refused: Refused | None = None) -> Iterator[None]:
    """Keep every other call, of this process or another one, from writing into the folder.

    The lock ends with the process, and processes that are forked do not inherit it (`lockf`).
    Other processes are not kept out on Windows, or if the file system has no locks.

    Args:
        folder: The folder.
        refused: Returns the error; by default that of a `fit` with checkpoints.

    Raises:
        LockstepError: If another call writes there.
        OSError: If the file of the lock cannot be written.
    """
    refused = refused or functools.partial(_refused, folder)
    writer, mine = (os.getpid(), os.path.realpath(folder)), object()
    # `lockf` locks for a process: two threads would both get the lock. `setdefault` is atomic.
    if _writers.setdefault(writer, mine) is not mine:
        raise refused("another call of this process")
    handle = None
    try:
        handle = None if sys.platform == "win32" else _locked(folder / FILE, refused)
        yield
    finally:
        try:
            if handle is not None:
                with contextlib.suppress(OSError):
                    os.unlink(folder / FILE)
                os.close(handle)
        finally:  # an interrupt above would keep this process out until it ends
            del _writers[writer]


def _locked(path: Path, refused: Refused) -> int | None:
    """Return the open file that has the lock, or `None` if the file system has no locks."""
    assert sys.platform != "win32"
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            other = os.pread(handle, 200, 0).decode(errors="replace")
            os.close(handle)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return None
            raise refused(f"process {other}") from None
        try:
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"{os.getpid()} on {platform.node()}".encode(), 0)
                return handle
        except FileNotFoundError:  # the previous writer has just ended, and removed this file
            pass
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(handle)
            raise
        os.close(handle)


def _refused(folder: Path, writer: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint folder {folder} is in use by {writer}: the two would delete\n"
        "each other's files. Wait for it, stop it, or choose a different folder."
    )
