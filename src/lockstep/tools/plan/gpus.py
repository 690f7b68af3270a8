"""GPUs for which a step can be compiled without having one."""

import tomllib
from pathlib import Path
from typing import Any

from lockstep.errors import DeviceError

_OF_ALL = {
    "shared_memory_per_block": 49152,
    "registers_per_block_limit": 65536,
    "registers_per_core_limit": 65536,
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
}

COMPILED_FROM = (7, 5)
"""The compute capability from which CUDA 13 and JAX compile."""

_BFLOAT16_FROM = (8, 0)


def gpu_named(name: str) -> dict[str, Any]:
    """Return what XLA has to know of a GPU, by the names of its descriptions.

    Raises:
        DeviceError: If the GPU is not known.
    """
    known = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text())
    found = known.get(str(name).lower())
    if str(name).lower().startswith("tpu"):
        raise DeviceError(
            f"gpu={name!r} was requested, but plan can compile a step only for GPUs.\nFor a "
            'TPU, pass the memory of one core, such as memory="16GB". The peak is then an '
            "estimate,\nwithout the padding to TPU tiles. It has not been tested on a TPU."
        )
    if found is None:
        raise DeviceError(
            f"gpu={name!r} was requested, but this GPU is not known.\nKnown GPUs: "
            f'{", ".join(known)}. For a different GPU, pass its memory, such as memory="24GB".'
        )
    major, minor = map(int, found.pop("capability").split("."))
    capability = {"major": major, "minor": minor}
    return {
        "platform_name": "CUDA",
        "device_description_str": found.pop("name"),
        "dnn_version_info": {"major": 9, "minor": 10},
        "runtime_version": {"major": 12, "minor": 8},
        "gpu_device_info": {**_OF_ALL, **found, "cuda_compute_capability": capability},
    }


def capability_of(gpu: dict[str, Any]) -> tuple[int, int]:
    """Return the compute capability of a GPU, from `gpu_named`."""
    found = gpu["gpu_device_info"]["cuda_compute_capability"]
    return found["major"], found["minor"]


def has_bfloat16(gpu: dict[str, Any]) -> bool:
    """Return whether a GPU, from `gpu_named`, computes in bfloat16."""
    return capability_of(gpu) >= _BFLOAT16_FROM
