"""Processes that wait for their turn, each pinned to a core of its own choosing."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from typing import Any

THREADS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TQDM_DISABLE": "1",
}


def is_compiling() -> bool:
    """Return whether this process, or one that it has started, waits for PyTorch's inductor."""
    waiting = [os.getpid()]
    while waiting:
        process = waiting.pop()
        with suppress(OSError):  # it has ended
            with open(f"/proc/{process}/cmdline") as file:
                if "traced.inductor" in file.read():
                    return True
            with open(f"/proc/{process}/task/{process}/children") as file:
                waiting += map(int, file.read().split())
    return False


class Worker:
    """A Python file in a process of its own, which answers one line of JSON for each word.

    Attributes:
        said: What it said when it was ready.
    """

    def __init__(self, file: str, *arguments: object, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, file, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **THREADS, **environment},
            text=True,
            start_new_session=True,
        )
        self.said: Any = None

    def wait(self) -> None:
        """Until it is ready."""
        self.said = self.answer()

    def ask(self, word: str) -> None:
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise SystemExit(f"A process ended with {self._process.wait()} before it answered.")

    def end(self) -> None:
        """Say that no more will come; those that talk with one another end together."""
        self._process.stdin.close()

    def wait_for_end(self) -> None:
        """It has said all that counts: what takes long to end (a connection) is ended."""
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def answer(value: Any) -> None:
    """In a worker: what the one who asked gets."""
    print(f"ANSWER {json.dumps(value)}", flush=True)


def pin(core: int) -> None:
    """In a worker: run on this core alone, of those that are allowed."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})
