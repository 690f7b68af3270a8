"""A file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from lockstep.errors import UnsuitableOutput


@contextlib.contextmanager
def appearing(output: str, source: str, suffix: str) -> Iterator[str]:
    """A temporary path beside `output`, which takes its place when the body succeeds.

    Guarantees that `output` holds either what it held before or the finished file,
    also after a power cut: the file and its folder are synced before this returns.

    Args:
        output: Where the file will be; replaced if it is there.
        source: The file that is read, which must be another one.
        suffix: Ending of the temporary file.

    Raises:
        UnsuitableOutput: The folder is missing or cannot be written, or both are one file.
    """
    folder = os.path.dirname(os.path.abspath(output))
    if os.path.isdir(output):
        raise UnsuitableOutput(f"{output} is a folder.\nGive the path of a file with -o.")
    if os.path.exists(output) and os.path.samefile(output, source):
        raise UnsuitableOutput(
            f"The output {output} is the file that is read.\n"
            "An old file is never overwritten by its rescue: give another path with -o."
        )
    try:
        handle, path = tempfile.mkstemp(dir=folder, prefix=".rescue-", suffix=suffix)
    except OSError as error:
        raise UnsuitableOutput(
            f"The folder {folder} cannot be written: {error.strerror}.\n"
            "Give a path in a folder that is there and yours with -o."
        ) from error
    os.close(handle)
    try:
        yield path
        os.chmod(path, 0o666 & ~_umask())
        _sync(path)
        os.replace(path, output)
        _sync(folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        raise


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
