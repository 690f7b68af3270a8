"""One GPU as several devices: `LOCKSTEP_SHARE_GPU`.

NCCL lets several ranks use one GPU from version 2.30 on, if `NCCL_MULTI_RANK_GPU_ENABLE` is 1. This
is a rehearsal with real kernels, real collectives and real memory. The ranks take turns, so it says
nothing about speed.
"""

import ctypes
import os
from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec
from pathlib import Path

from lockstep.core.devices import count_of_devices
from lockstep.errors import DeviceError, UnsupportedBackend, counted

SHARE_GPU = "LOCKSTEP_SHARE_GPU"
"""The environment variable that makes several devices of one GPU."""

OLDEST_NCCL = (2, 30)
"""The first version of NCCL that lets several ranks use one GPU."""

_SEVERAL_RANKS = "NCCL_MULTI_RANK_GPU_ENABLE"
_JAX_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_TAKEN_BY_JAX = 0.75
"""The part of a GPU's memory that JAX takes by default."""

Version = tuple[int, ...]


def shares_of_gpu(environ: Mapping[str, str]) -> int | None:
    """Return of how many devices one GPU is made, `None` if GPUs are devices as they are.

    Raises:
        DeviceError: If the variable is not a whole number of at least 1.
    """
    asked = environ.get(SHARE_GPU, "").strip()
    return count_of_devices(asked, f"{SHARE_GPU}={asked}", "a shared GPU") if asked else None


def check_one_gpu(shares: int, gpus: int, tpus: int = 0) -> None:
    """Check that there is one GPU to share.

    Args:
        shares: The number of devices that are made of it.
        gpus: The number of GPUs that this process sees.
        tpus: The number of TPUs that it sees.

    Raises:
        DeviceError: If there is another number of GPUs.
    """
    if gpus == 1:
        return
    if tpus:
        raise DeviceError(
            f"{SHARE_GPU}={shares} was set, but the devices are TPUs, and lockstep cannot "
            "divide a TPU into several devices.\nUnset the variable to train on "
            f"{counted(tpus, 'TPU')}, or set LOCKSTEP_REHEARSE={shares}\nto rehearse on virtual "
            "CPU devices."
        )
    remedy = (
        "Set CUDA_VISIBLE_DEVICES to one of them, or unset the variable to train on all."
        if gpus
        else f"To rehearse on virtual CPU devices, set LOCKSTEP_REHEARSE={shares}."
    )
    raise DeviceError(
        f"{SHARE_GPU}={shares} was set, which makes {counted(shares, 'device')} out of one GPU, "
        f"but {counted(gpus, 'GPU')} {'is' if gpus == 1 else 'are'} visible.\n{remedy}"
    )


def let_ranks_share(environ: MutableMapping[str, str], version: Version | None) -> None:
    """Let NCCL use one GPU for several ranks of this process and its children.

    Args:
        environ: The environment, usually `os.environ`.
        version: The version of NCCL, `None` where unknown.

    Raises:
        UnsupportedBackend: If that version cannot do it.
    """
    problem = cannot_share(version)
    if problem:
        raise UnsupportedBackend(
            f"{SHARE_GPU}={environ[SHARE_GPU]} was set, but {problem}.\nInstall a newer "
            "version: pip install --upgrade nvidia-nccl-cu12 (or -cu13, as your CUDA)."
        )
    environ.setdefault(_SEVERAL_RANKS, "1")


def cannot_share(version: Version | None) -> str:
    """Return why ranks cannot share a GPU with this version of NCCL, `""` if they can."""
    needed = ".".join(map(str, OLDEST_NCCL))
    if version is None:
        return f"NCCL was not found, and version {needed} or later is needed"
    if version < OLDEST_NCCL:
        return f"NCCL {'.'.join(map(str, version))} is installed, but {needed} or later is needed"
    return ""


def variables_of_share(shares: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that has one share of a GPU.

    Each process of JAX takes its share of the memory that JAX takes by default.
    """
    given = {_SEVERAL_RANKS: "1", _JAX_MEMORY: f"{_TAKEN_BY_JAX / shares:.3f}"}
    own = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")
    if any(environ.get(name) for name in own):
        del given[_JAX_MEMORY]
    return {name: environ.get(name, value) for name, value in given.items()}


def shared_words(environ: Mapping[str, str]) -> str:
    """Return what the first line of `fit` says of a shared GPU, `""` if it is not shared."""
    shares = shares_of_gpu(environ)
    if shares is None:
        return ""
    memory = environ.get(_JAX_MEMORY)
    return f", one GPU, shared{f', {float(memory):.0%} of its memory each' if memory else ''}"


def nccl_version() -> Version | None:
    """Return the version of the NCCL library that frameworks load, `None` if it is not found."""
    for library in [*_packaged(), "libnccl.so.2"]:
        number = ctypes.c_int()
        try:
            ctypes.CDLL(str(library)).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        # nccl.h, NCCL_VERSION: from 2.9 on 10,000, 100 and 1 for its three numbers.
        return number.value // 10000, number.value // 100 % 100, number.value % 100
    return None


def _packaged() -> list[Path]:
    """Return the library of the packages nvidia-nccl-cu12 and nvidia-nccl-cu13."""
    try:
        found = find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    folders = [] if found is None else found.submodule_search_locations or []
    return [Path(each, "lib", "libnccl.so.2") for each in folders if os.path.isdir(each)]
