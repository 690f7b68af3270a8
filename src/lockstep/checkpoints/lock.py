"""One process at a time writes into the folder of a run."""

import contextlib
import errno
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import CheckpointError

if sys.platform != "win32":
    import fcntl

FILE = "lockstep.lock"


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """While it lasts, no other process may write into the folder.

    The lock goes with the process, whatever ends it, and is not handed on to those that it forks
    (`lockf`). Where a file system knows no locks, and on Windows, there is none.

    Raises:
        CheckpointError: If another process writes there.
    """
    path = folder / FILE
    handle = None if sys.platform == "win32" else _locked(path)
    try:
        yield
    finally:
        if handle is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(handle)


def _locked(path: Path) -> int | None:
    assert sys.platform != "win32"
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"{os.getpid()} on {platform.node()}".encode(), 0)
                return handle
        except FileNotFoundError:
            pass  # who had the lock has just ended, and removed this file
        except OSError as error:
            held = error.errno in (errno.EACCES, errno.EAGAIN)
            other = os.pread(handle, 200, 0).decode(errors="replace")
            os.close(handle)
            if not held:
                return None
            raise CheckpointError(
                f"{path.parent} was given for checkpoints, and process {other} writes there: each "
                "would remove what\nthe other has written. Wait for it, end it, or name another "
                "folder."
            ) from None
        os.close(handle)
