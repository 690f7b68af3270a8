"""What each process on a host gets: its share of the devices, and the address where all meet."""

import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lockstep.core.devices import REHEARSE
from lockstep.core.environment import (
    COORDINATOR,
    LOCAL_PROCESS,
    LOCAL_PROCESSES,
    PROCESS,
    PROCESSES,
    Place,
)
from lockstep.core.shared_gpu import SHARE_GPU, check_one_gpu, shares_of_gpu, variables_of_share
from lockstep.errors import LaunchError, ProcessesDisagree, counted, first_line

CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Return the names of the GPUs, as the variable of `variable_for` writes them.

    Args:
        environ: The environment of the process.
        root: The folder with `dev` and `sys`.

    Returns:
        The names, none where JAX is told to run on CPUs.
    """
    if environ.get(REHEARSE, "").strip() or environ.get("JAX_PLATFORMS", "").strip() == "cpu":
        return []
    count = _number_of_gpus(root)
    if variable_for(root) == HIP:  # which counts among those of ROCR, and reads CUDA's variable too
        count = len(_named(environ.get(ROCR), count))
        return _named(environ.get(HIP, environ.get(CUDA)), count)
    return _named(environ.get(CUDA), count)


def variable_for(root: Path = Path("/")) -> str:
    """Return the variable that says which GPUs a process sees, on this machine."""
    return HIP if _amd_gpus(root) else CUDA


def _named(visible: str | None, count: int | None) -> list[str]:
    """Return the names of the visible GPUs, by the value of a variable.

    CUDA and HIP ignore everything from the first name on that names none.

    Args:
        visible: The value, `None` if it is not set.
        count: The number of GPUs of this machine, `None` where unknown.
    """
    if visible is None:
        return [str(number) for number in range(count or 0)]
    found: list[str] = []
    for name in map(str.strip, visible.split(",")):
        is_number = name.isdecimal() and (count is None or int(name) < count)
        if not (is_number or name.startswith(("GPU-", "MIG-"))):
            break
        found.append(name)
    return found


def _number_of_gpus(root: Path) -> int | None:
    """Return the number of GPUs of this machine, `None` where it does not say so."""
    nvidia = nvidia_gpus(root)
    if nvidia:
        return nvidia
    if (root / "dev/dxg").exists():  # Windows has the devices of WSL 2
        command = root / "usr/lib/wsl/lib/nvidia-smi"
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=20)
            return len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE))
    return _amd_gpus(root) or None


def nvidia_gpus(root: Path = Path("/")) -> int:
    """Return the number of NVIDIA GPUs that have a device file."""
    return sum(each.name[6:].isdecimal() for each in (root / "dev").glob("nvidia*"))


def _amd_gpus(root: Path) -> int:
    """Return the number of GPUs for ROCm: those of the kernel's list that this process may open."""
    found = 0
    for file in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        with suppress(OSError):
            values = dict(line.split() for line in file.read_text().splitlines())
            minor = values.get("drm_render_minor", "0")
            is_gpu = values.get("simd_count", "0") != "0"
            found += is_gpu and (root / f"dev/dri/renderD{minor}").exists()
    return found


def devices_of_each(
    processes: int, per_process: int | None, environ: Mapping[str, str], root: Path = Path("/")
) -> list[dict[str, str]]:
    """Return for each process the variables that give it its devices.

    The visible GPUs are divided. Without a GPU, `per_process` virtual CPU devices are rehearsed.

    Args:
        processes: The number of processes.
        per_process: The number of devices of each, `None` for an equal share of all.
        environ: The environment of the launcher.
        root: The folder with `dev` and `sys`.

    Raises:
        LaunchError: If there are not enough GPUs, or they cannot be divided.
        DeviceError: If one GPU is to be shared, and another number is here.
    """
    gpus = visible_gpus(environ, root)
    shares = None if environ.get(REHEARSE, "").strip() else shares_of_gpu(environ)
    if shares is not None:
        check_one_gpu(shares, len(gpus))
        if (processes, per_process or 1) != (shares, 1):
            raise LaunchError(
                f"--processes={processes} was requested, but {SHARE_GPU}={shares} makes "
                f"{counted(shares, 'device')} out of one GPU, one per process.\n"
                f"Start one process per device: --processes {shares}."
            )
        own = {variable_for(root): gpus[0], **variables_of_share(shares, environ)}
        return [own] * processes
    if not gpus:
        rehearsed = {} if per_process is None else {REHEARSE: str(per_process)}
        return [rehearsed] * processes
    if per_process is None and len(gpus) % processes and processes < len(gpus):
        raise LaunchError(
            f"--processes={processes} was requested, but {len(gpus)} GPUs cannot be divided "
            "equally between them.\n"
            f"Add --devices-per-process, or set {variable_for(root)} to fewer GPUs."
        )
    share = per_process or max(1, len(gpus) // processes)
    if processes * share > len(gpus):
        raise LaunchError(
            f"--processes={processes} with {counted(share, 'device')} each need "
            f"{counted(processes * share, 'GPU')}; {counted(len(gpus), 'GPU')} available: "
            f"{', '.join(gpus)}.\n"
            f"Start fewer processes, or rehearse on virtual CPU devices: {REHEARSE}={share}."
        )
    parts = [gpus[rank * share : (rank + 1) * share] for rank in range(processes)]
    return [{variable_for(root): ",".join(part)} for part in parts]


def devices_of_process(place: Place, visible: int) -> list[int] | None:
    """Return the GPUs that this process takes, by their position among the visible ones.

    Launchers such as torchrun let every process of a host see all GPUs.

    Args:
        place: The place of this process.
        visible: The number of GPUs that it sees.

    Returns:
        The positions; `None` for all.

    Raises:
        ProcessesDisagree: If the processes of this host cannot divide the GPUs.

    Example:
        >>> devices_of_process(Place(rank=1, size=2, local_rank=1, local_size=2), visible=4)
        [2, 3]
    """
    rank, size = place.local_rank, place.local_size
    if not visible or place.divides_devices or rank is None or size is None or size == 1:
        return None
    if visible % size:
        raise ProcessesDisagree(
            f"{size} processes run on this host ({place.launcher}), and each sees "
            f"{counted(visible, 'GPU')}: they would use the same GPUs.\n"
            f"Start {counted(_fitting(visible, size), 'process')} per host, or set "
            f"CUDA_VISIBLE_DEVICES and {LOCAL_PROCESSES}=1 in each."
        )
    share = visible // size
    return list(range(rank * share, (rank + 1) * share))


def _fitting(visible: int, most: int) -> int:
    """Return the largest number of processes, up to `most`, that divides the GPUs."""
    return max(size for size in range(1, most + 1) if visible % size == 0)


def place_of_each(processes: int) -> list[dict[str, str]]:
    """Return for each process of this host the variables that `find_place` reads.

    Args:
        processes: The number of processes.
    """
    if processes == 1:
        return [{PROCESSES: "1"}]
    address = free_address("127.0.0.1")
    return [
        {
            PROCESSES: str(processes),
            PROCESS: str(rank),
            LOCAL_PROCESSES: str(processes),
            LOCAL_PROCESS: str(rank),
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


def announce_coordinator(place: Place) -> None:
    """Print where the processes meet, and check that this host has the port free.

    A framework reports a port in use late, or ends Python.

    Args:
        place: The place of the first process.

    Raises:
        ProcessesDisagree: If the port is in use.
    """
    address = place.coordinator or ""
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ProcessesDisagree(
                f"This is {place}, but the processes cannot connect at {address}: port {port} "
                f"of this host: {error.strerror}.\n"
                f"Set {COORDINATOR}=host:port in every process, with a free port of this host."
            ) from None
    said = f"lockstep: {place.size} processes connect at {address} ({place.launcher}: "
    print(said + f"{', '.join(place.variables)})", file=sys.stderr, flush=True)


def not_met(place: Place, error: Exception) -> ProcessesDisagree:
    """Return the error of a process that has not met the others."""
    return ProcessesDisagree(
        f"This is {place}, and it could not connect to the others at {place.coordinator}: "
        f"{first_line(error, 60)}\nCheck that process 0 is running and reachable at this "
        f"address, or set {COORDINATOR}=host:port in every process."
    )
