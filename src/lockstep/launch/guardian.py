"""Ends the processes of a run if the launcher dies, however it dies.

A program of its own, in a session of its own. It reads from its standard input the process groups
that have started (`+id`) and ended (`-id`). At the end of the input the launcher is gone. Then all
processes get SIGTERM, on which `lockstep.Checkpoint` saves, and later their groups are killed.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time


class Guard:
    """The guardian of the processes that this one starts.

    Args:
        seconds: How long the processes have to end by themselves.
        folder: A folder to remove at the end.
    """

    def __init__(self, seconds: float, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(seconds), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def add(self, process: int) -> None:
        """Guard a process and its group."""
        self._tell(f"+{process}\n")

    def remove(self, process: int) -> None:
        """Guard a process no longer: it has ended."""
        self._tell(f"-{process}\n")

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        with contextlib.suppress(OSError):  # somebody has killed it
            assert pipe is not None
            pipe.write(line)
            pipe.flush()

    def close(self) -> None:
        """End the guardian."""
        with contextlib.suppress(OSError):
            self._process.communicate(timeout=10)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def guard(seconds: float, folder: str) -> None:
    """Wait for the end of the input; then end the processes, and remove the launcher's folder."""
    running: set[int] = set()
    for line in sys.stdin:
        (running.add if line[0] == "+" else running.discard)(int(line[1:]))
    for process in running:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGTERM)
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(map(_is_alive, running)):
        time.sleep(0.05)
    for process in running:
        with contextlib.suppress(OSError):
            os.killpg(process, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guard(float(sys.argv[1]), sys.argv[2])
