"""What a benchmark runs on: CPU cores, or GPUs where there are any."""

import argparse
import os
import subprocess
import time
from collections.abc import Callable

CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "gpu": time.perf_counter}
"""CPU time says nothing of what a GPU does; there the clock on the wall counts."""
_NAMES = "CUDA_VISIBLE_DEVICES"


def gpus() -> list[str]:
    """The GPUs that may be used, by their names in `CUDA_VISIBLE_DEVICES`."""
    here = _asked("index")
    chosen = os.environ.get(_NAMES)
    return here if chosen is None or not here else _visible(chosen)


def _asked(what: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [line.strip() for line in listed.splitlines() if line.strip()]


def _visible(names: str) -> list[str]:
    """As CUDA reads them: up to the first that is none."""
    found = []
    for name in names.split(","):
        if not (name.strip().isdecimal() or name.strip().startswith(("GPU-", "MIG-"))):
            break
        found.append(name.strip())
    return found


def described(platform: str) -> str:
    """What ran, for the record."""
    if platform == "cpu":
        return f"{os.cpu_count()} cores"
    return "; ".join(_asked("index,name,driver_version")) + f"; of these {', '.join(gpus())}"


def add_platform(parser: argparse.ArgumentParser) -> None:
    """`--platform`."""
    parser.add_argument("--platform", choices=CLOCKS, default="cpu", help="default: %(default)s")


def require(platform: str, devices: int) -> None:
    """End with a sentence where there are fewer devices, one for each process."""
    found = len(gpus()) if platform == "gpu" else len(os.sched_getaffinity(0))
    if found < devices:
        each = "GPUs" if platform == "gpu" else "cores"
        raise SystemExit(f"{devices} {each} are needed, and there are {found}.")


def environment(platform: str, number: int = 0) -> dict[str, str]:
    """For a process that is to see the CPU alone, or one GPU and nothing else of its memory."""
    if platform == "cpu":
        return {"JAX_PLATFORMS": "cpu", _NAMES: ""}
    # Several processes share a GPU: none takes more of its memory than it needs.
    growing = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    return {_NAMES: gpus()[number], "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **growing}


def check(platform: str, library: str, found: str) -> None:
    """Raise `ImportError` where a library would run on something else."""
    if found != platform:
        raise ImportError(f"this {library} has no {platform.upper()}, it runs on {found!r}")
