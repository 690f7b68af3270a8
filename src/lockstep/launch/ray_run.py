"""A run on the nodes of a Ray cluster: one actor on each, which has the process of the node.

Ray's own trainers are not used: its JaxTrainer replaces CUDA_VISIBLE_DEVICES, and trains on CPUs
without joining the processes (Ray 2.60).
"""

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.devices import REHEARSE
from lockstep.errors import LaunchError
from lockstep.launch.environment import without_launchers
from lockstep.launch.output import Output, print_line
from lockstep.launch.patience import Patience
from lockstep.launch.rank import Rank
from lockstep.launch.ray_cluster import alive_nodes, first_line
from lockstep.launch.ray_node import NodePlace, NodeProcess, Report
from lockstep.launch.ray_nodes import Nodes, Share, share_of
from lockstep.launch.shares import place_of_each
from lockstep.launch.status import Status
from lockstep.launch.supervision import STOP_WITHIN, Group, Outcome, run_with_restarts
from lockstep.package_versions import install_command, package_version

STARTS_WITHIN = 120.0
"""Seconds for nodes to come back, for room on them, and for the actors to start."""
_ASK_FOR = 0.5
"""Seconds for which an actor waits for output before it reports."""
_REPORTS_WITHIN = 10.0
"""Seconds that an actor has for its last reports. It may be lost."""
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
        function: The function, as `function_process.pack` returns it.
    """

    name: str
    command: tuple[str, ...] = ()
    folder: str | None = None
    function: bytes | None = None


def run_on_ray(
    ray: Any,
    work: Work,
    nodes: Nodes,
    gpus_per_node: int | None,
    restarts: int,
    patience: Patience | None,
    stops: list[int],
) -> "Outcome[RayGroup]":
    """Run a script or a function in one process on each node, and again after a failure.

    On PyTorch, it is one process for each GPU of the nodes.

    After a failure the group is made of the nodes that are alive then.

    Args:
        ray: The module, connected.
        work: The script or the function.
        nodes: The number of nodes.
        gpus_per_node: GPUs of each, 0 for a run on CPUs; `None` for all that there are.
        restarts: How many times all processes may start again.
        patience: How long a process may stand still, `None` for ever.
        stops: The signals that have asked the run to stop.

    Raises:
        LaunchError: If the nodes are not there, or cannot run the script.
        KeyboardInterrupt: If a signal comes before the processes have started.
    """
    given = passed_on(os.environ)
    if given.get(REHEARSE, "").strip() or given.get("JAX_PLATFORMS", "").strip() == "cpu":
        gpus_per_node = 0
    one_gpu_each = given.get("KERAS_BACKEND") == "torch"

    def start(attempt: int) -> RayGroup:
        until = time.monotonic() + STARTS_WITHIN
        told = False
        while True:
            try:
                share = share_of(alive_nodes(ray), nodes, gpus_per_node, one_gpu_each=one_gpu_each)
                return RayGroup(ray, work, share, given, until, stops)
            except (LaunchError, _NotStarted) as error:
                # A node that was lost may come back, or be replaced.
                refused = isinstance(error, LaunchError) and not attempt
                if refused or time.monotonic() > until:
                    raise error if isinstance(error, LaunchError) else error.in_words() from None
                if not told:
                    print_line(f"waiting for nodes: {str(error).splitlines()[0]}")
                    told = True
            _wait(1.0, stops)

    return run_with_restarts(start, work.name, restarts, patience, stops)


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the launcher that the processes get, besides those of their node."""
    return {
        name: value
        for name, value in without_launchers(environ).items()
        if (name.startswith(_PASSED_ON) or name in _ALSO_PASSED_ON) and name not in _OF_ONE_PROCESS
    }


def _wait(seconds: float, stops: list[int]) -> None:
    """Wait, unless a signal asks the run to stop."""
    if stops:
        raise KeyboardInterrupt
    time.sleep(seconds)


class _NotStarted(Exception):
    """The group was not started, and may be a little later."""

    def in_words(self) -> LaunchError:
        return LaunchError(
            f"The nodes of Ray did not start the run within {STARTS_WITHIN:.0f} s: {self}\n"
            "Look at the cluster with `ray status`, or ask for less."
        )


class _RayRank(Rank):
    """One process of the run, on a node of the cluster.

    Attributes:
        place: Its node.
        result: What its function has left, as bytes.
        is_done: Whether nothing more comes from it.
    """

    def __init__(self, number: int, actor: Any, place: NodePlace) -> None:
        super().__init__(number)
        self.actor = actor
        self.place = place
        self.result: bytes | None = None
        self.is_done = False
        self._out, self._error = Output(number, sys.stdout), Output(number, sys.stderr)
        self._status = Status()
        self._is_stopped = self._reports = self._is_lost = False
        self._heard_at = time.time()

    @property
    def shown(self) -> tuple[Output, Output]:
        """What the launcher shows of its output, its errors last."""
        return self._out, self._error

    @property
    def reports(self) -> bool:
        """Whether it has imported lockstep."""
        return self._reports

    def status(self) -> Status:
        """Return what the process last said about itself."""
        return self._status

    def has_ended(self) -> bool:
        """Return whether the process has ended, or its node is lost."""
        return self._is_lost or self.code is not None

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process."""
        return self._is_stopped

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
        """Show a report and keep what it says. Times are of the clock of this machine."""
        self._heard_at = time.time()
        ahead = report.now - self._heard_at
        for output, data in ((self._out, report.out), (self._error, report.error)):
            if data:
                output.write(data)
        self._status = report.status
        if report.status.failed_at is not None:
            self._status = replace(report.status, failed_at=report.status.failed_at - ahead)
        self._is_stopped, self._reports = report.is_stopped, report.reports
        if report.code is not None and self.code is None:
            self.code, self.ended_at = report.code, report.ended_at - ahead
        self.is_done = self.code is not None and not report.has_more

    def lose(self, words: str) -> None:
        """Keep that the node or its actor is lost, since the last report."""
        if not self.has_ended() and not self.killed:
            self._status = replace(
                self._status, failure=words, failed_by=None, failed_at=self._heard_at
            )
        self._is_lost = self.is_done = True


class RayGroup(Group):
    """The processes of one attempt, on each node."""

    def __init__(
        self,
        ray: Any,
        work: Work,
        share: Share,
        environ: Mapping[str, str],
        until: float,
        stops: list[int],
    ) -> None:
        self._ray = ray
        self._has_function = work.function is not None
        self._placement: Any = None
        self._actors: list[Any] = []
        self._calls: dict[Any, _RayRank] = {}
        self.ranks: list[_RayRank] = []
        try:
            self._place(share, until, stops)
            self._start(work, share, environ, until)
        except BaseException as error:
            self._release()
            if isinstance(error, ray.exceptions.RayError):
                raise self._why_not_started(error) from error
            raise

    def _why_not_started(self, error: Exception) -> Exception:
        exceptions = self._ray.exceptions
        may_pass = isinstance(error, exceptions.RayActorError | exceptions.GetTimeoutError)
        text = str(error).strip()
        if may_pass and "creation task" not in text:
            return _NotStarted(first_line(error))
        return LaunchError(
            f"Ray could not start the run on a node: {text.splitlines()[-1]}\n"
            "Install lockstep with Ray on all nodes, in the same versions: "
            f"{install_command('ray')}"
        )

    def _place(self, share: Share, until: float, stops: list[int]) -> None:
        """Reserve the share of each node, and make an actor there."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._placement = placement_group([share.bundle] * share.nodes, strategy="STRICT_SPREAD")
        alive = alive_nodes(self._ray)
        patient_until = min(until, time.monotonic() + STARTS_WITHIN / 4)
        while not self._placement.wait(0.5):
            _wait(0.0, stops)
            if alive_nodes(self._ray) != alive:
                raise _NotStarted("nodes have come or gone.")
            if time.monotonic() > patient_until:
                raise _NotStarted(f"there is no room for {share}, other jobs run there.")
        for number in range(share.nodes * share.each):
            there = PlacementGroupSchedulingStrategy(self._placement, number // share.each)
            of_node = self._ray.remote(NodeProcess).options(
                num_cpus=share.cpus, num_gpus=share.gpus // share.each, scheduling_strategy=there
            )
            self._actors.append(of_node.remote(STOP_WITHIN))

    def _start(self, work: Work, share: Share, environ: Mapping[str, str], until: float) -> None:
        def ask(calls: list[Any]) -> list[Any]:
            answers: list[Any] = self._ray.get(calls, timeout=max(1.0, until - time.monotonic()))
            return answers

        places: list[NodePlace] = ask([actor.place.remote() for actor in self._actors])
        hosts = list(dict.fromkeys(place.host for place in places))
        script = work.command[0] if work.command else None
        version = package_version("keras-lockstep")
        for place in places:
            if place.lockstep != version:
                raise LaunchError(
                    f"The node {place.host} has lockstep {place.lockstep}, and the launcher has "
                    f"{version}.\nInstall the same version on all nodes."
                )
        missing = ask([actor.missing.remote(work.folder, script) for actor in self._actors])
        for place, path in zip(places, missing, strict=True):
            if path is not None:
                raise LaunchError(
                    f"{work.name} was to run on the node {place.host}, which has no {path}.\n"
                    "Use a folder that all nodes share, or have Ray copy one: --working-dir FOLDER."
                )
        print_line(f"Ray, {share}: {', '.join(hosts)}")
        ask(
            [
                actor.start.remote(
                    number,
                    [*work.command],
                    work.folder,
                    {**environ, **variables},
                    share.gpus,
                    work.function,
                )
                for number, (actor, variables) in enumerate(
                    zip(
                        self._actors,
                        place_of_each(len(places), places[0].free_address),
                        strict=True,
                    )
                )
            ]
        )
        for number, (actor, place) in enumerate(zip(self._actors, places, strict=True)):
            rank = _RayRank(number, actor, place)
            self.ranks.append(rank)
            self._calls[actor.report.remote(_ASK_FOR)] = rank

    def pass_on(self, seconds: float) -> None:
        """Wait this long for reports of the processes, and show what they say."""
        if not self._calls:
            time.sleep(seconds)
            return
        ready, _ = self._ray.wait([*self._calls], num_returns=1, timeout=seconds)
        for call in ready:
            rank = self._calls.pop(call)
            try:
                rank.take(self._ray.get(call))
            except self._ray.exceptions.RayError as error:
                rank.lose(self._why_lost(rank, error))
            if not rank.is_done:
                self._calls[rank.actor.report.remote(_ASK_FOR)] = rank

    def _why_lost(self, rank: _RayRank, error: Exception) -> str:
        host = rank.place.host
        if rank.place.node not in {node.name for node in alive_nodes(self._ray)}:
            return f"the node {host} was lost"
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            return f"the node {host} does not answer"
        return f"the Ray actor on the node {host} was lost: {first_line(error)}"

    def close(self) -> None:
        """Show the rest of the output, fetch the results, and end the actors."""
        until = time.monotonic() + _REPORTS_WITHIN
        while self._calls and time.monotonic() < until:
            self.pass_on(0.2)
        for rank in self.ranks:
            for output in rank.shown:
                output.close()
            if self._has_function and rank.code is not None:
                with contextlib.suppress(self._ray.exceptions.RayError):  # it is lost
                    rank.result = self._ray.get(rank.actor.result.remote())
        self._release()

    def results(self) -> list[bytes | None]:
        """Return what the function has left in each process."""
        return [rank.result for rank in self.ranks]

    def _release(self) -> None:
        """End the actors and give the nodes back."""
        from ray.util.placement_group import remove_placement_group

        errors = (self._ray.exceptions.RayError, ConnectionError)
        for each in [actor.close.remote() for actor in self._actors]:
            with contextlib.suppress(*errors):  # it is lost
                self._ray.get(each, timeout=_REPORTS_WITHIN)
        for actor in self._actors:
            with contextlib.suppress(*errors):
                self._ray.kill(actor)
        if self._placement is not None:
            with contextlib.suppress(*errors):
                remove_placement_group(self._placement)
