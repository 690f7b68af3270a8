"""Which nodes of a Ray cluster a run takes, and what of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import LaunchError


@dataclass(frozen=True)
class Nodes:
    """The number of nodes that a run asks for.

    Attributes:
        least: With fewer, it does not start.
        most: It takes as many as there are, up to this number.
    """

    least: int
    most: int

    def __str__(self) -> str:
        """Return the number, or the range, as `--nodes` takes it."""
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True)
class Node:
    """One node that is alive: its name in Ray, its address, its GPUs and its CPUs."""

    name: str
    address: str
    gpus: int
    cpus: int

    def __str__(self) -> str:
        """Return the node in words.

        Example:
            >>> str(Node("f3", "10.0.0.2", gpus=4, cpus=32))
            '10.0.0.2 (4 GPUs, 32 CPUs)'
        """
        gpus = f"{_count(self.gpus, 'GPU')}, " if self.gpus else ""
        return f"{self.address} ({gpus}{_count(self.cpus, 'CPU')})"


@dataclass(frozen=True)
class Share:
    """What a run takes: a number of nodes, and the same of each.

    Attributes:
        nodes: The number of nodes.
        gpus: The GPUs of each; 0 for a run on CPUs.
        cpus: The CPUs of each; 0 for a run on GPUs, which Ray then counts alone.
        each: The number of processes on each node, which divide its GPUs.
    """

    nodes: int
    gpus: int
    cpus: int
    each: int = 1

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray is to reserve on each node."""
        return {"GPU": self.gpus} if self.gpus else {"CPU": self.cpus}

    def __str__(self) -> str:
        """Return the share in words."""
        each = _count(self.gpus, "GPU") if self.gpus else _count(self.cpus, "CPU")
        return f"{_count(self.nodes, 'node')} with {each}{' each' if self.nodes > 1 else ''}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def share_of(
    nodes: Sequence[Node], asked: Nodes, gpus: int | None, *, one_gpu_each: bool = False
) -> Share:
    """Return what a run takes of the nodes that are there.

    Args:
        nodes: The nodes that are alive.
        asked: How many the run asks for.
        gpus: GPUs of each node, 0 for a run on CPUs; `None` for all GPUs of the nodes that have
            some, and for CPUs where no node has one.
        one_gpu_each: Whether a node runs a process for each GPU, as PyTorch needs.

    Raises:
        LaunchError: If too few nodes are there, or they have different numbers of GPUs.

    Example:
        >>> two = [Node("a", "10.0.0.1", 0, cpus=8), Node("b", "10.0.0.2", 0, cpus=4)]
        >>> share_of(two, Nodes(1, 4), gpus=None)
        Share(nodes=2, gpus=0, cpus=4)
    """
    on_gpus = any(node.gpus for node in nodes) if gpus is None else gpus > 0
    fit = [node for node in nodes if (node.gpus >= (gpus or 1) if on_gpus else node.cpus)]
    there = ", ".join(map(str, nodes)) or "none"
    if len(fit) < asked.least:
        kind = f" with {_count(gpus, 'GPU')}" if gpus else " with GPUs" if on_gpus else ""
        remedy = "Ask for fewer, or start more nodes" if fit else "Start nodes"
        raise LaunchError(
            f"--nodes={asked} was asked for, and the Ray cluster has "
            f"{_count(len(fit), 'node')}{kind}: {there}.\n{remedy}."
        )
    taken = sorted(fit, key=lambda node: node.gpus if on_gpus else node.cpus, reverse=True)
    taken = taken[: asked.most]
    if not on_gpus:
        return Share(len(taken), 0, taken[-1].cpus)
    fewest = taken[-1].gpus
    if gpus is None and taken[0].gpus != fewest:
        raise LaunchError(
            f"--nodes={asked} was asked for, and the nodes have different numbers of GPUs: "
            f"{there}.\nTake {fewest} of each with --gpus-per-node {fewest}, or fewer nodes."
        )
    count = gpus or fewest
    return Share(len(taken), count, 0, count if one_gpu_each else 1)
