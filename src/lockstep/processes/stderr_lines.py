"""Filters lines out of what C++ writes to the standard error of this process."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_lines(words: bytes) -> Iterator[None]:
    """Leave lines with these words out of standard error inside the context.

    All other lines pass as they are, those of other threads and child processes too.

    Args:
        words: What the lines have in them.
    """
    try:
        shown = os.dup(2)
    except OSError:  # a process without standard error
        yield
        return
    read, write = os.pipe()
    os.dup2(write, 2)
    os.close(write)
    # A child process of another thread may have the pipe for longer: the thread goes on for it.
    thread = threading.Thread(target=_pass_on, args=(read, os.dup(shown), words), daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.dup2(shown, 2)
        os.close(shown)
        thread.join(timeout=1.0)


def _pass_on(read: int, shown: int, words: bytes) -> None:
    with open(read, "rb") as lines, open(shown, "wb", buffering=0) as output:
        for line in lines:
            if words not in line:
                output.write(line)
