"""A file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

from lockstep.errors import UnsuitableOutput
from lockstep.rescue import blank


@contextlib.contextmanager
def appearing(output: str, source: str, suffix: str, size: int = 0) -> Iterator[str]:
    """A temporary path beside `output`, which takes its place when the body succeeds.

    Guarantees that `output` holds either what it held before or the finished file,
    also after a power cut: the file and its folder are synced before this returns.

    Args:
        output: Where the file will be; replaced if it is there.
        source: The file that is read, which must be another one.
        suffix: Ending of the temporary file.
        size: Bytes that the new file may need.

    Raises:
        UnsuitableOutput: The folder is missing, full or cannot be written, or both are one
            file.
    """
    folder = os.path.dirname(os.path.abspath(output))
    if os.path.isdir(output):
        raise UnsuitableOutput(f"{output} is a folder.\nGive the path of a file with -o.")
    if os.path.exists(output) and os.path.samefile(output, source):
        raise UnsuitableOutput(
            f"The output {output} is the file that is read.\n"
            "An old file is never overwritten by its rescue: give another path with -o."
        )
    _require_room(folder, size)
    try:
        handle, path = tempfile.mkstemp(dir=folder, prefix=".rescue-", suffix=suffix)
    except OSError as error:
        raise UnsuitableOutput(
            f"The folder {folder} cannot be written: {error.strerror}.\n"
            "Give a path in a folder that is there and yours with -o."
        ) from error
    os.close(handle)
    try:
        with _told(output):
            yield path
            os.chmod(path, 0o666 & ~_umask())
            _sync(path)
            blank.require_wanted()
            os.replace(path, output)
            _sync(folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        raise


def _require_room(folder: str, size: int) -> None:
    """Raise before HDF5 meets a full disk, on which it may end the whole process."""
    free = shutil.disk_usage(folder).free if os.path.isdir(folder) else size
    if free < size:
        raise UnsuitableOutput(
            f"The new file needs up to {size:,} bytes, and {folder} has {free:,} left.\n"
            "Make room, or give a path on another disk with -o."
        )


@contextlib.contextmanager
def _told(output: str) -> Iterator[None]:
    """Tell a disk that fails while it is written to as an UnsuitableOutput."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        said = " ".join(str(error).split())
        if isinstance(error, RuntimeError) and "write failed" not in said:
            raise
        raise UnsuitableOutput(
            f"{output} could not be written: {said[:160]}.\n"
            "Nothing was written. Make room, or give a path on another disk with -o."
        ) from error


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
