"""The devices of each process of `lockstep run`, as environment variables."""

import socket
from collections.abc import Mapping

from lockstep.devices import REHEARSE
from lockstep.errors import LaunchError, counted
from lockstep.launch.environment import (
    COORDINATOR,
    LOCAL_PROCESS,
    LOCAL_PROCESSES,
    PROCESS,
    PROCESSES,
)
from lockstep.launch.gpus import visible_gpus


def devices_of_each(
    processes: int, per_process: int | None, environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return for each process the variables that give it its devices.

    The visible GPUs are divided. Without a GPU, `per_process` virtual CPU devices are rehearsed.

    Args:
        processes: The number of processes.
        per_process: The number of devices of each, `None` for an equal share of all.
        environ: The environment of the launcher.

    Raises:
        LaunchError: If there are not enough GPUs, or they cannot be divided.
    """
    gpus = visible_gpus(environ)
    if not gpus:
        rehearsed = {} if per_process is None else {REHEARSE: str(per_process)}
        return [rehearsed] * processes
    if per_process is None and len(gpus) % processes and processes < len(gpus):
        raise LaunchError(
            f"--processes={processes} was asked for, and {len(gpus)} GPUs are here, which they "
            "cannot divide.\n"
            "Add --devices-per-process, or set CUDA_VISIBLE_DEVICES to fewer GPUs."
        )
    share = per_process or max(1, len(gpus) // processes)
    if processes * share > len(gpus):
        raise LaunchError(
            f"--processes={processes} with {counted(share, 'device')} each need "
            f"{counted(processes * share, 'GPU')}; {counted(len(gpus), 'GPU')} here: "
            f"{', '.join(gpus)}.\n"
            f"Start fewer, or rehearse on virtual CPU devices: {REHEARSE}={share}."
        )
    parts = [gpus[rank * share : (rank + 1) * share] for rank in range(processes)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


def place_of_each(processes: int, address: str | None = None) -> list[dict[str, str]]:
    """Return for each process the variables that `find_place` reads.

    Args:
        processes: The number of processes.
        address: Where they meet, one process on each host; `None` for processes on this host.
    """
    if processes == 1:
        return [{PROCESSES: "1"}]
    here = address is None
    address = address or free_address("127.0.0.1")
    return [
        {
            PROCESSES: str(processes),
            PROCESS: str(rank),
            LOCAL_PROCESSES: str(processes if here else 1),
            LOCAL_PROCESS: str(rank if here else 0),
            COORDINATOR: address,
            # JAX would listen on all interfaces.
            "JAX_COORDINATOR_BIND_ADDRESS": address,
        }
        for rank in range(processes)
    ]


def free_address(host: str) -> str:
    """Return an address of this host, with a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
