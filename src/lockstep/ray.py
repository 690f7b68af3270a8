"""A function on the nodes of a Ray cluster, from Python or a notebook.

Ray is imported when `run` is called.
"""

import os
import signal
from collections.abc import Callable
from typing import TypeVar, cast

from lockstep.errors import LaunchError
from lockstep.launch.ray_node import pack, unpack
from lockstep.launch.ray_run import Work, connected, run_on_ray, share_of
from lockstep.launch.supervision import HangTimeout, stop_signals

Value = TypeVar("Value")


def run(
    function: Callable[[], Value],
    nodes: int = 1,
    *,
    address: str | None = None,
    gpus_per_node: int | None = None,
    restarts: int = 0,
    hang_timeout: float | None = None,
) -> Value:
    """Call a function in one process on each node of a Ray cluster, and return its value.

    The processes train together where the function calls `lockstep.distribute`, as those of
    `lockstep run --on ray` do. Each is a fresh Python with the GPUs of its node. Ray forwards its
    output, each line with the number of the process.

    Args:
        function: A function without arguments; use `functools.partial` to give it some. It may be
            defined in the script or notebook; other modules have to be on the nodes.
        nodes: The number of nodes, at least 1.
        address: `ray://host:port`; the cluster of this machine if left out.
        gpus_per_node: GPUs of each node, 0 for a run on CPUs; all of them if left out.
        restarts: How many times all processes may start again after a failure. With
            `lockstep.Checkpoint` on shared storage they go on where they were.
        hang_timeout: Seconds that a process may stand still in a call of a model; if left out,
            600 while it compiles and 120 otherwise.

    Returns:
        The value of the function in process 0.

    Raises:
        LaunchError: If the run cannot start, or a process fails. Its cause is the exception of the
            function, where there is one.
        KeyboardInterrupt: After Ctrl-C, when the processes have saved and ended.

    Example:
        >>> import lockstep.ray
        >>> def train():
        ...     model = build_model()
        ...     lockstep.distribute(model)
        ...     model.fit(x, y, batch_size=256, epochs=3)
        ...     return model.get_weights()
        >>> weights = lockstep.ray.run(train, nodes=2)
    """
    if not (isinstance(nodes, int) and nodes >= 1):
        raise LaunchError(
            f"nodes={nodes} was asked for, and it has to be a number of at least 1.\n"
            "Give for example nodes=2."
        )
    name = getattr(function, "__name__", type(function).__name__)
    limits = HangTimeout.of(hang_timeout)
    with connected(address) as ray, stop_signals() as stops:
        # After the connection: Ray takes SIGTERM for itself.
        work = Work(name, function=pack(function))
        share = share_of(ray, nodes, gpus_per_node, os.environ)
        outcome = run_on_ray(ray, work, share, restarts, limits, stops)
    results = [unpack(rank.result) for rank in outcome.group.ranks]
    if outcome.cause is not None:
        returned, error = results[outcome.cause.rank]
        raise LaunchError(
            f"{name} failed in process {outcome.cause.rank} of {len(results)}: {outcome.cause}.\n"
            "Its output is above."
        ) from (error if isinstance(error, BaseException) else None)
    if outcome.status:
        raise KeyboardInterrupt if stops[0] == signal.SIGINT else SystemExit(outcome.status)
    returned, value = results[0]
    if not returned:
        raise LaunchError(
            f"{name} ended without a value: {value or 'its process has called sys.exit()'}.\n"
            "Let it return a value that can be pickled, and that this Python can read."
        ) from value
    return cast(Value, value)
