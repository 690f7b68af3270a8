"""The process of a run on one node of a Ray cluster. It is started and read by a Ray actor."""

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch.environment import without_launchers
from lockstep.launch.guardian import Guard
from lockstep.launch.rank_process import Pipes, RankProcess
from lockstep.launch.shares import free_address
from lockstep.launch.status import Status
from lockstep.package_versions import package_version

_BATCH = 0.05
"""Seconds for which output is collected, so that a progress bar does not flood the network."""


@dataclass(frozen=True)
class Report:
    """What happened in a process since the last report.

    Attributes:
        out: Its output.
        error: Its errors.
        status: What it last said about itself.
        code: Its exit status, `None` while it runs.
        ended_at: The time of its end, by the clock of the node.
        is_stopped: Whether a signal has stopped it.
        reports: Whether it has imported lockstep.
        has_more: Whether there is more output to read.
        now: The time of the report, by the clock of the node.
    """

    out: bytes
    error: bytes
    status: Status
    code: int | None
    ended_at: float
    is_stopped: bool
    reports: bool
    has_more: bool
    now: float


@dataclass(frozen=True)
class NodePlace:
    """Where an actor is.

    Attributes:
        node: The name of the node in Ray.
        host: Its address.
        free_address: Its address with a free port.
        lockstep: The version of lockstep there.
    """

    node: str
    host: str
    free_address: str
    lockstep: str | None


class _Collected:
    """The output since the last report."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> None:
        self._data += data

    def close(self) -> None:
        pass

    def take(self) -> bytes:
        data = bytes(self._data)
        self._data.clear()
        return data


class NodeProcess:
    """The process of one node: a script, or a function in a fresh Python.

    Args:
        stop_within: Seconds that the process has to save if this actor dies.
    """

    def __init__(self, stop_within: float) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="lockstep-run-"))
        self._guard = Guard(stop_within, str(self._folder), detached=True)
        self._pipes = Pipes()
        self._out, self._error = _Collected(), _Collected()
        self._rank: RankProcess | None = None

    @staticmethod
    def missing(folder: str | None, script: str | None) -> str | None:
        """Return what the node does not have: the working directory, or the script in it."""
        if folder is not None and not Path(folder).is_dir():
            return f"folder {folder}"
        if script is not None and not (Path(folder or "") / script).is_file():
            return f"file {Path(folder or os.getcwd()) / script}"
        return None

    def place(self) -> NodePlace:
        """Return where this actor is."""
        import ray

        host = ray.util.get_node_ip_address()
        version = package_version("keras-lockstep")
        return NodePlace(ray.get_runtime_context().get_node_id(), host, free_address(host), version)

    def start(
        self,
        number: int,
        command: list[str],
        folder: str | None,
        variables: Mapping[str, str],
        gpus: int,
        function: bytes | None = None,
    ) -> None:
        """Start the process.

        Args:
            number: Its number.
            command: The script and its arguments; none for a function.
            folder: Its working directory; `None` for that of the actor.
            variables: Its variables, besides those of the node.
            gpus: The number of GPUs that Ray has given to this actor.
            function: What `pack` of `function_process` has returned.
        """
        if function is not None:
            self._function_file.write_bytes(function)
            module = "lockstep.launch.function_process"
            command = ["-m", module, str(self._function_file), str(self._result_file)]
        mine = {
            name: value
            for name, value in without_launchers(os.environ).items()
            # Ray sets both in its workers.
            if name not in ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")
        }
        if function is not None:  # its modules, where Ray's own functions find them
            mine["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if not gpus:
            mine["CUDA_VISIBLE_DEVICES"] = ""
        self._rank = RankProcess(
            number,
            [sys.executable, *command],
            {**mine, **variables, "PYTHONUNBUFFERED": "1"},
            self._folder / "status.json",
            self._out,
            self._error,
            folder,
        )
        self._guard.add(self._rank.process.pid)
        self._pipes.add(self._rank)

    def report(self, seconds: float) -> Report:
        """Wait this long for output, and return what happened since the last report."""
        rank = self._started
        self._pipes.pass_on(seconds)
        code = None if not rank.has_ended() else rank.code
        time.sleep(_BATCH)
        self._pipes.pass_on(0.0)
        return Report(
            self._out.take(),
            self._error.take(),
            rank.status(),
            code,
            rank.ended_at,
            rank.is_stopped(),
            rank.reports,
            self._pipes.has_more(),
            time.time(),
        )

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
        if self._rank is not None:
            self._rank.kill()
            self._rank.process.wait()
            self._guard.remove(self._rank.process.pid)
        self._guard.close()  # removes the folder

    @property
    def _started(self) -> RankProcess:
        assert self._rank is not None
        return self._rank

    @property
    def _function_file(self) -> Path:
        return self._folder / "function.pickle"

    @property
    def _result_file(self) -> Path:
        return self._folder / "result.pickle"
