"""A large new file, written past the memory in which an operating system keeps files.

That memory (the page cache) makes one more copy, has to be found first, and pushes out what
training uses. Without it (`O_DIRECT`) a disk takes whole blocks from memory that begins at a
page, and nothing else; so parts are gathered in two blocks, of which one is filled while the
other is being written. Where a file system knows no such writing, the same goes through the
page cache.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

BLOCK = 16 * 2**20
"""Bytes handed to the disk at once."""
_SECTOR = 4096
"""What lengths and positions divide by: pages, and the sectors of every common disk."""


def write_large_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a new file, and return when the disk has it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _set_direct(handle, True)
        with ThreadPoolExecutor(1, "lockstep checkpoint") as beside:
            length = _write_parts(handle, parts, beside)
        os.ftruncate(handle, length)
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_parts(
    handle: int, parts: Iterable[bytes | memoryview], beside: ThreadPoolExecutor
) -> int:
    """Write the parts, the last block filled up with zeros; how long the file is without."""
    blocks = [np.frombuffer(mmap.mmap(-1, BLOCK), "uint8") for _ in range(2)]
    at = filled = 0
    under_way: Future[None] | None = None
    for part in parts:
        left = np.frombuffer(part, "uint8")
        while left.size:
            taken = min(left.size, BLOCK - filled)
            np.copyto(blocks[0][filled : filled + taken], left[:taken])
            left, filled = left[taken:], filled + taken
            if filled == BLOCK:
                if under_way is not None:
                    under_way.result()
                under_way = beside.submit(_write_block, handle, blocks[0], at)
                blocks.reverse()
                at, filled = at + BLOCK, 0
    if under_way is not None:
        under_way.result()
    if filled:
        whole = -(-filled // _SECTOR) * _SECTOR
        blocks[0][filled:whole] = 0
        _write_block(handle, blocks[0][:whole], at)
    return at + filled


def _write_block(handle: int, block: np.ndarray, at: int) -> None:
    data = block.data
    while data:
        try:
            written = os.pwrite(handle, data, at)
        except OSError as error:
            if error.errno != errno.EINVAL or not _set_direct(handle, False):
                raise
            continue
        data, at = data[written:], at + written


def _set_direct(handle: int, direct: bool) -> bool:
    """Write past the page cache, or no longer; whether that was changed."""
    flag = getattr(os, "O_DIRECT", 0)  # Linux alone has it
    with contextlib.suppress(OSError):
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        if bool(flags & flag) != direct:
            fcntl.fcntl(handle, fcntl.F_SETFL, flags ^ flag)
            return True
    return False
