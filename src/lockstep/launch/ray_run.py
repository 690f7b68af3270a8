"""A run on the nodes of a Ray cluster: an actor on each, which has the process of the node.

Ray reserves the nodes, copies the folder and forwards the output. Its own trainers are not used:
its JaxTrainer replaces CUDA_VISIBLE_DEVICES, and trains on CPUs without joining the processes
(Ray 2.60).
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from lockstep.devices import REHEARSE
from lockstep.errors import LaunchError, counted
from lockstep.launch.environment import without_launchers
from lockstep.launch.rank import Rank, print_line
from lockstep.launch.ray_node import NodeProcess, Report
from lockstep.launch.shares import place_of_each
from lockstep.launch.status import Status
from lockstep.launch.supervision import STOP_WITHIN, Group, HangTimeout, Outcome, run_with_restarts
from lockstep.package_versions import install_command, package_version

STARTS_WITHIN = 120.0
"""Seconds for room on the nodes, and for the actors to start."""
_ANSWERS_WITHIN = 10.0
_REPORT_EVERY = 0.5
_CLOSES_WITHIN = 10.0
"""Seconds that an actor has to end. It may be lost."""
_OUTPUT_WITHIN = 1.0
"""Seconds for which Ray may hold the last output back."""
_PASSED_ON = ("KERAS_", "LOCKSTEP_", "JAX_", "XLA_", "TF_", "NCCL_")
_ALSO_PASSED_ON = ("OMP_NUM_THREADS", "PYTHONHASHSEED")
_OF_ONE_PROCESS = ("LOCKSTEP_JOINED", "LOCKSTEP_STATUS")


@dataclass(frozen=True)
class Work:
    """What every node does.

    Attributes:
        name: The script or the function, for messages.
        command: The script and its arguments; none for a function.
        folder: The working directory; `None` for the folder that Ray has copied to the node.
        function: The function, as `ray_node.pack` returns it.
    """

    name: str
    command: tuple[str, ...] = ()
    folder: str | None = None
    function: bytes | None = None


@dataclass(frozen=True)
class Share:
    """What Ray reserves: a number of nodes, and the same of each.

    Attributes:
        nodes: The number of nodes.
        gpus: The GPUs of each; 0 for a run on CPUs, which reserves one CPU.
        each: The number of processes on each node, which divide its GPUs.
    """

    nodes: int
    gpus: int
    each: int = 1

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves on each node."""
        return {"GPU": self.gpus} if self.gpus else {"CPU": 1}

    def __str__(self) -> str:
        """Return the share in words."""
        gpus = f" with {counted(self.gpus, 'GPU')}" if self.gpus else ""
        return f"{counted(self.nodes, 'node')}{gpus}{' each' if gpus and self.nodes > 1 else ''}"


@contextmanager
def connected(address: str | None, working_dir: str | None = None) -> Iterator[Any]:
    """Be connected to a Ray cluster; give the module `ray`.

    A connection that is there already is used, and stays.

    Args:
        address: `ray://host:port`, or `host:port` of a cluster that this machine is part of;
            `None` for `RAY_ADDRESS`, the cluster of this machine, or else a new one of it.
        working_dir: A folder that Ray copies to the nodes.

    Raises:
        LaunchError: If Ray is not installed, or nobody answers at the address.
    """
    try:
        import ray
    except ImportError:
        raise LaunchError(
            "A run on Ray was asked for, and Ray is not installed.\n"
            f"Install it: {install_command('ray')}"
        ) from None
    if ray.is_initialized():
        if address is not None or working_dir is not None:
            raise LaunchError(
                f"The address {address} was given, and Ray is connected already.\n"
                "Leave the address out, or call ray.shutdown() first."
            )
        yield ray
        return
    _check_answers(address or os.environ.get("RAY_ADDRESS", ""))
    copied = None if working_dir is None else {"working_dir": working_dir}
    try:
        ray.init(address, runtime_env=copied, log_to_driver=True, logging_level=logging.ERROR)
    # Without an answer, Ray ends Python.
    except (RuntimeError, ConnectionError, ValueError, ImportError, SystemExit) as error:
        raise LaunchError(
            f"Ray did not connect to {address or 'a cluster'}: {_first_line(error)}\n"
            "Look at the cluster with `ray status`."
        ) from error
    try:
        yield ray
        time.sleep(_OUTPUT_WITHIN)
    except ConnectionError as error:
        raise LaunchError(
            f"The connection to Ray was lost: {_first_line(error)}\n"
            "Ray ends the processes. With lockstep.Checkpoint, the same command goes on."
        ) from error
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Check that somebody answers at an address. Ray itself takes two minutes to give up."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # "auto", say
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWERS_WITHIN).close()
    except (OSError, OverflowError) as error:
        raise LaunchError(
            f"No server at {address}, the address of Ray: {error}.\n"
            "Start Ray there with `ray start --head`, or give its address."
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def share_of(ray: Any, nodes: int, gpus_per_node: int | None, environ: Mapping[str, str]) -> Share:
    """Return what a run reserves.

    Args:
        ray: The module, connected.
        nodes: The number of nodes.
        gpus_per_node: GPUs of each node, 0 for a run on CPUs; `None` for all GPUs, of the nodes
            that have some, of which the smallest counts.
        environ: The environment of the processes. PyTorch needs a process for each GPU.
    """
    if environ.get(REHEARSE, "").strip() or environ.get("JAX_PLATFORMS", "").strip() == "cpu":
        gpus_per_node = 0
    if gpus_per_node is None:
        there = sorted((gpus for _, gpus in _alive(ray) if gpus), reverse=True)
        gpus_per_node = there[:nodes][-1] if there else 0
    one_gpu_each = environ.get("KERAS_BACKEND") == "torch"
    return Share(nodes, gpus_per_node, max(1, gpus_per_node) if one_gpu_each else 1)


def _alive(ray: Any) -> list[tuple[str, int]]:
    """Return the address and the GPUs of each node that is alive."""
    return [
        (each["NodeManagerAddress"], int(each["Resources"].get("GPU", 0)))
        for each in ray.nodes()
        if each["Alive"]
    ]


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the launcher that the processes get, besides those of their node."""
    return {
        name: value
        for name, value in without_launchers(environ).items()
        if (name.startswith(_PASSED_ON) or name in _ALSO_PASSED_ON) and name not in _OF_ONE_PROCESS
    }


def run_on_ray(
    ray: Any,
    work: Work,
    share: Share,
    restarts: int,
    limits: HangTimeout | None,
    stops: list[int],
) -> "Outcome[RayGroup]":
    """Run a script or a function in a process on each node, and again after a failure.

    Args:
        ray: The module, connected.
        work: The script or the function.
        share: What it takes of the nodes.
        restarts: How many times all processes may start again.
        limits: How long a process may stand still, `None` for ever.
        stops: The signals that have asked the run to stop.

    Raises:
        LaunchError: If the nodes are not there, or cannot run the script.
        KeyboardInterrupt: If a signal comes before the processes have started.
    """

    def start(attempt: int) -> RayGroup:
        until = time.monotonic() + STARTS_WITHIN
        while True:
            try:
                return RayGroup(ray, work, share, until, stops)
            except ray.exceptions.RayActorError:  # on a node that was lost a moment ago
                if not attempt or time.monotonic() > until:
                    raise
            time.sleep(1.0)

    try:
        return run_with_restarts(start, work.name, restarts, limits, stops)
    except ray.exceptions.RayError as error:
        raise LaunchError(
            f"Ray could not start {work.name} on a node: {str(error).strip().splitlines()[-1]}\n"
            "All nodes need lockstep with Ray in the same versions, and the folder, or "
            "--working-dir."
        ) from error


class _RayRank(Rank):
    """One process of the run, on a node of the cluster.

    Attributes:
        result: What its function has left, as bytes.
    """

    shown = ()  # Ray forwards the output

    def __init__(self, number: int, actor: Any, host: str) -> None:
        super().__init__(number)
        self.actor = actor
        self.host = host
        self.result: bytes | None = None
        self._last = Report()
        self._is_lost = False

    @property
    def reports(self) -> bool:
        """Whether it has imported lockstep."""
        return self._last.reports

    def status(self) -> Status:
        """Return what the process last said about itself."""
        return self._last.status

    def has_ended(self) -> bool:
        """Return whether the process has ended, or its node is lost."""
        return self._is_lost or self.code is not None

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process."""
        return self._last.is_stopped

    def send(self, number: int) -> None:
        """Send a signal to the process."""
        if not self.has_ended():
            self.actor.send.remote(number)

    def kill(self) -> None:
        """End the process and all that it has started."""
        self.killed |= not self.has_ended()
        if not self._is_lost:
            self.actor.kill.remote()

    def take(self, report: Report) -> None:
        """Keep a report. The times are those of this machine, as clocks may differ."""
        before, status = self._last.status.failed_at, report.status
        if status.failed_at is not None:
            status = replace(status, failed_at=before or time.time())
        self._last = replace(report, status=status)
        self.code, self.ended_at = report.code, time.time()  # or the last time it was heard of

    def lose(self, error: Exception) -> None:
        """Keep that the node or its actor is lost."""
        if not self.killed:
            # Others fail before Ray knows of the loss.
            words = f"the process on the node {self.host} was lost: {type(error).__name__}"
            at = self.ended_at or time.time()
            lost = replace(self.status(), failure=words, failed_by=None, failed_at=at)
            self._last = replace(self._last, status=lost)
        self._is_lost = True


class RayGroup(Group):
    """The processes of one attempt, on each node."""

    others_end_within = 90.0
    """Ray notices a lost node after 10 s, and after a minute if its machine does not answer."""

    def __init__(self, ray: Any, work: Work, share: Share, until: float, stops: list[int]) -> None:
        self._ray = ray
        self._has_function = work.function is not None
        self._placement: Any = None
        self._actors: list[Any] = []
        self._calls: dict[Any, _RayRank] = {}
        self.ranks: list[_RayRank] = []
        try:
            self._place(share, until, stops)
            self._start(work, share, until)
        except BaseException:
            self._release()
            raise

    def _place(self, share: Share, until: float, stops: list[int]) -> None:
        """Reserve the share of each node, and make the actors there."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._placement = placement_group([share.bundle] * share.nodes, strategy="STRICT_SPREAD")
        told = False
        while not self._placement.wait(1.0):
            if stops:
                raise KeyboardInterrupt
            if not told:
                print_line(f"waiting for {share} of Ray")
                told = True
            if time.monotonic() > until:
                there = ", ".join(
                    host + (f" ({counted(gpus, 'GPU')})" if gpus else "")
                    for host, gpus in _alive(self._ray)
                )
                raise LaunchError(
                    f"{share} of Ray: no room within {STARTS_WITHIN:.0f} s. Alive are: {there}.\n"
                    "Ask for fewer, start more nodes, or look at the cluster with `ray status`."
                )
        for number in range(share.nodes * share.each):
            there = PlacementGroupSchedulingStrategy(self._placement, number // share.each)
            of_node = self._ray.remote(NodeProcess).options(
                num_cpus=0 if share.gpus else 1,
                num_gpus=share.gpus // share.each,
                scheduling_strategy=there,
            )
            self._actors.append(of_node.remote(number, STOP_WITHIN))

    def _start(self, work: Work, share: Share, until: float) -> None:
        def ask(calls: list[Any]) -> list[Any]:
            answers: list[Any] = self._ray.get(calls, timeout=max(1.0, until - time.monotonic()))
            return answers

        places = ask([actor.place.remote() for actor in self._actors])
        version = package_version("keras-lockstep")
        for host, _, there in places:
            if there != version:
                raise LaunchError(
                    f"The node {host} has lockstep {there}, and the launcher has {version}.\n"
                    "Install the same version on all nodes."
                )
        hosts = dict.fromkeys(host for host, _, _ in places)
        print_line(f"Ray, {share}: {', '.join(hosts)}")
        given = passed_on(os.environ)
        if not share.gpus:
            given["CUDA_VISIBLE_DEVICES"] = ""
        variables = place_of_each(len(places), places[0][1])
        ask(
            [
                actor.start.remote([*work.command], work.folder, {**given, **mine}, work.function)
                for actor, mine in zip(self._actors, variables, strict=True)
            ]
        )
        for number, (actor, (host, _, _)) in enumerate(zip(self._actors, places, strict=True)):
            rank = _RayRank(number, actor, host)
            self.ranks.append(rank)
            self._calls[actor.report.remote(_REPORT_EVERY)] = rank

    def pass_on(self, seconds: float) -> None:
        """Wait this long for reports of the processes."""
        if not self._calls:
            time.sleep(seconds)
            return
        ready, _ = self._ray.wait([*self._calls], num_returns=1, timeout=seconds)
        for each in ready:
            rank = self._calls.pop(each)
            try:
                rank.take(self._ray.get(each))
            except self._ray.exceptions.RayError as error:
                rank.lose(error)
            if not rank.has_ended():
                self._calls[rank.actor.report.remote(_REPORT_EVERY)] = rank

    def close(self) -> None:
        """Fetch the results, and end the actors."""
        for rank in self.ranks:
            if self._has_function and rank.code is not None:
                with contextlib.suppress(self._ray.exceptions.RayError):  # it is lost
                    rank.result = self._ray.get(rank.actor.result.remote())
        self._release()

    def _release(self) -> None:
        """End the actors and give the nodes back."""
        from ray.util.placement_group import remove_placement_group

        errors = (self._ray.exceptions.RayError, ConnectionError)
        for each in [actor.close.remote() for actor in self._actors]:
            with contextlib.suppress(*errors):  # it is lost
                self._ray.get(each, timeout=_CLOSES_WITHIN)
        for actor in self._actors:
            with contextlib.suppress(*errors):
                self._ray.kill(actor)
        if self._placement is not None:
            with contextlib.suppress(*errors):
                remove_placement_group(self._placement)
