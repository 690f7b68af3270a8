"""The process of a run on one node of a Ray cluster: a Ray actor starts and reads it.

python -m lockstep.launch.ray_node FUNCTION RESULT

calls a function there, which `pack` has packed.
"""

import contextlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import LaunchError
from lockstep.launch.environment import PROCESS, without_launchers
from lockstep.launch.guardian import Guard
from lockstep.launch.local_run import RankProcess
from lockstep.launch.shares import free_address
from lockstep.launch.status import Status
from lockstep.package_versions import package_version


@dataclass(frozen=True)
class Report:
    """The state of a process: its status, exit status, and what `Rank` says of it."""

    status: Status = field(default_factory=Status)
    code: int | None = None
    is_stopped: bool = False
    reports: bool = False


class NodeProcess:
    """The process of one node: a script, or a function in a fresh Python.

    Ray forwards its output, with the text of this object before each line.

    Args:
        number: Its number.
        stop_within: Seconds that the process has to save if this actor dies.
    """

    def __init__(self, number: int, stop_within: float) -> None:
        self._number = number
        self._folder = Path(tempfile.mkdtemp(prefix="lockstep-run-"))
        self._guard = Guard(stop_within, str(self._folder), detached=True)
        self._result_file = self._folder / "result.pickle"
        self._process: RankProcess | None = None

    def __repr__(self) -> str:
        """Return the name of the process."""
        return f"process {self._number}"

    def place(self) -> tuple[str, str, str | None]:
        """Return the host, its address with a free port, and its version of lockstep."""
        import ray

        host = ray.util.get_node_ip_address()
        return host, free_address(host), package_version("keras-lockstep")

    def start(
        self,
        command: list[str],
        folder: str | None,
        variables: Mapping[str, str],
        function: bytes | None = None,
    ) -> None:
        """Start the process.

        Args:
            command: The script and its arguments; none for a function.
            folder: Its working directory; `None` for the one that Ray gives to this actor.
            variables: Its variables, besides those of the node.
            function: What `pack` has returned.
        """
        # Ray sets the first two in its workers.
        not_passed = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")
        given = without_launchers(os.environ)
        mine = {name: value for name, value in given.items() if name not in not_passed}
        if function is not None:
            function_file = self._folder / "function.pickle"
            function_file.write_bytes(function)
            command = ["-m", "lockstep.launch.ray_node", str(function_file), str(self._result_file)]
            # Its modules are where Ray's own functions find them.
            mine["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = RankProcess(
            self._number,
            [sys.executable, *command],
            {**mine, **variables, "PYTHONUNBUFFERED": "1"},
            self._folder / "status.json",
            None,
            None,
            folder,
        )
        self._guard.add(self._process.process.pid)

    def report(self, seconds: float) -> Report:
        """Return the state of the process after this many seconds, or at its end."""
        process, until = self._started, time.monotonic() + seconds
        while not process.has_ended() and time.monotonic() < until:
            time.sleep(0.05)
        return Report(process.status(), process.code, process.is_stopped(), process.reports)

    def send(self, number: int) -> None:
        """Send a signal to the process."""
        self._started.send(number)

    def kill(self) -> None:
        """End the process and all that it has started."""
        self._started.kill()

    def result(self) -> bytes | None:
        """Return what the function has returned or raised, `None` if it left neither."""
        return self._result_file.read_bytes() if self._result_file.exists() else None

    def close(self) -> None:
        """End what is left of the process, and remove the files."""
        if self._process is not None:
            self._process.kill()
            self._process.process.wait()
            self._guard.remove(self._process.process.pid)
        self._guard.close()  # removes the folder

    @property
    def _started(self) -> RankProcess:
        assert self._process is not None
        return self._process


def pack(function: Callable[[], object]) -> bytes:
    """Return a function as bytes; one of a script or a notebook by value.

    Raises:
        LaunchError: If it cannot be pickled.
    """
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps(function)
    except Exception as error:
        raise LaunchError(
            f"{function!r} was to run on the nodes, and it cannot be pickled: {error}.\n"
            "Let the function make such objects itself."
        ) from error
    return packed


def call(function_file: Path, result_file: Path) -> None:
    """Call the packed function. Process 0 writes its value, and any process its error."""
    import cloudpickle

    function = pickle.loads(function_file.read_bytes())
    try:
        value = function()
        if int(os.environ.get(PROCESS, 0)) == 0:
            result_file.write_bytes(cloudpickle.dumps((True, value)))
    except BaseException as error:
        with contextlib.suppress(Exception):
            result_file.write_bytes(cloudpickle.dumps((False, error)))
        raise


def unpack(result: bytes | None) -> tuple[bool, Any]:
    """Return whether the function has returned, and its value or its error."""
    if result is None:
        return False, None
    try:
        returned, value = pickle.loads(result)
    except Exception as error:
        return False, error
    return returned, value


if __name__ == "__main__":
    call(*map(Path, sys.argv[1:]))
