"""`python benchmarks/checkpoint_writes.py`: ways to bring arrays and their checksums to a disk.

Twenty-four arrays of 33 MB, as in checkpoint_cost.py, each way once a round in an order of
chance, until fsync has returned; ratios are to a raw sequential write and fsync of as many
bytes in the same round. Linux alone has all of them.
"""

import argparse
import ctypes
import os
import random
import statistics
import tempfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lockstep.checkpoints.direct import write_large_file
from lockstep.checkpoints.files import CHUNK, write_file

LIBC = ctypes.CDLL(None)
BLOCK = os.urandom(CHUNK)


def checked(arrays):
    for piece in pieces(arrays):
        zlib.crc32(piece)
        yield piece


def pieces(arrays):
    for array in arrays:
        for start in range(0, array.size, CHUNK):
            yield array[start : start + CHUNK].data


def raw(path, arrays):
    write_file(path, (BLOCK[: len(piece)] for piece in pieces(arrays)))


def page_cache(path, arrays):
    write_file(path, checked(arrays))


def checksums_in_a_thread(path, arrays):
    with ThreadPoolExecutor(1) as beside:
        checks = [beside.submit(zlib.crc32, array) for array in arrays]
        write_file(path, pieces(arrays))
        for check in checks:
            check.result()


def fallocate(path, arrays):
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.posix_fallocate(handle, 0, sum(array.size for array in arrays))
    for piece in checked(arrays):
        os.write(handle, piece)
    end(handle)


def sync_file_range(path, arrays):
    """Writing back begins at once."""
    handle, at = os.open(path, os.O_WRONLY | os.O_CREAT), 0
    for piece in checked(arrays):
        os.write(handle, piece)
        LIBC.sync_file_range(handle, ctypes.c_long(at), ctypes.c_long(len(piece)), 2)
        at += len(piece)
    end(handle)


def fdatasync_in_a_thread(path, arrays):
    handle, done = os.open(path, os.O_WRONLY | os.O_CREAT), threading.Event()

    def sync():
        while not done.wait(0.05):
            os.fdatasync(handle)

    thread = threading.Thread(target=sync)
    thread.start()
    for piece in checked(arrays):
        os.write(handle, piece)
    done.set()
    thread.join()
    end(handle)


def past_the_page_cache(path, arrays):
    """What lockstep does."""
    write_large_file(path, checked(arrays))


def past_the_page_cache_unchecked(path, arrays):
    write_large_file(path, pieces(arrays))


def end(handle):
    os.fsync(handle)
    os.close(handle)


WAYS = [
    raw,
    page_cache,
    checksums_in_a_thread,
    fallocate,
    sync_file_range,
    fdatasync_in_a_thread,
    past_the_page_cache,
    past_the_page_cache_unchecked,
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, 2880 * 2880 * 4, dtype="uint8") for _ in range(24)]
    found, loads = {way: [] for way in WAYS}, []
    chance = random.Random(0)
    for _ in range(options.rounds):
        loads.append(os.getloadavg()[0])
        for way in chance.sample(WAYS, len(WAYS)):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                os.sync()
                began = time.perf_counter()
                way(Path(folder) / "file", arrays)
                found[way].append(time.perf_counter() - began)
    print(f"load {min(loads):.1f} to {max(loads):.1f}; raw {spread(found[raw])} s")
    for way in WAYS:
        ratios = [mine / theirs for mine, theirs in zip(found[way], found[raw], strict=True)]
        print(f"{way.__name__:30} {spread(ratios)} of raw; {spread(found[way])} s")


def spread(values):
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


if __name__ == "__main__":
    main()
