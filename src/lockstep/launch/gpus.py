"""The GPUs that a process started now would see, without a framework."""

import re
from collections.abc import Mapping
from pathlib import Path

from lockstep.devices import REHEARSE


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the names of the NVIDIA GPUs, as `CUDA_VISIBLE_DEVICES` writes them.

    Args:
        environ: The environment of the process.
        devices: The folder with the device files.

    Returns:
        The names, none where JAX is told to run on CPUs.
    """
    if environ.get(REHEARSE, "").strip() or environ.get("JAX_PLATFORMS", "").strip() == "cpu":
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        files = [file.name for file in devices.glob("nvidia*")]
        numbers = [int(name[6:]) for name in files if re.fullmatch(r"nvidia\d+", name)]
        return [str(position) for position in range(len(numbers))]
    names = [name.strip() for name in visible.split(",")]
    # CUDA ignores everything from the first invalid name on.
    return names[: names.index("-1")] if "-1" in names else [name for name in names if name]
