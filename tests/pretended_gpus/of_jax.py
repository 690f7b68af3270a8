"""JAX's CPU devices under the name of GPUs, or of TPUs.

Each process has as many GPUs as `CUDA_VISIBLE_DEVICES` names, and one CPU: the last CPU device of
JAX. Lockstep and Keras's iterators see GPUs; JAX itself and its compiler see the CPU devices that
they are. `PRETENDED_NO_CPU` hides the CPU, as `JAX_PLATFORMS=cuda` does. `PRETENDED_TPUS=4` makes
four devices that are named TPUs, where no variable of CUDA is set.
"""

import os
import sys
from functools import cache, wraps
from typing import Any

from tests.pretended_gpus.visible import version_of_nccl

MEMORY = 10**11
_WHO = ("lockstep", "keras.src.backend.jax.trainer", "keras.src.backend.jax.distribution_lib")


def _asks(depth: int = 2) -> bool:
    """Return whether lockstep, or Keras's iterator, is the caller of the caller."""
    name: str = sys._getframe(depth).f_globals.get("__name__", "")
    return name.startswith(_WHO)


def _pretend() -> None:
    import jax

    tpus = int(os.environ.get("PRETENDED_TPUS", 0))
    count = tpus or len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    name = "tpu" if tpus else "gpu"
    jax.config.update("jax_num_cpu_devices", 1 + count)
    kind: Any = jax.Device
    platform, stats, number = kind.platform, kind.memory_stats, kind.id
    found = jax.devices

    @cache
    def gpus() -> list[Any]:
        every = found("cpu")
        last = {each.process_index: each for each in every}
        return [each for each in every if each is not last[each.process_index]]

    def cpus() -> list[Any]:
        if os.environ.get("PRETENDED_NO_CPU"):
            raise RuntimeError("Unknown backend cpu. Available backends are ['cuda']")
        gone = set(gpus())
        return [each for each in found("cpu") if each not in gone]

    @wraps(found)
    def devices(backend: str | None = None) -> list[Any]:
        return cpus() if backend == "cpu" else gpus()

    def memory_stats(self: Any) -> Any:
        if not _asks():
            return stats(self)
        if self.process_index != jax.process_index():
            raise jax.errors.JaxRuntimeError(
                "INVALID_ARGUMENT: MemoryStats is only supported for addressable PjRt devices."
            )
        return {"bytes_limit": MEMORY}

    kind.platform = property(
        lambda self: name if _asks() and self in gpus() else platform.__get__(self)
    )
    kind.id = property(
        lambda self: gpus().index(self) if _asks() and self in gpus() else number.__get__(self)
    )
    kind.memory_stats = memory_stats
    default = jax.default_backend
    jax.devices = devices
    jax.local_devices = lambda *args, **kwargs: [
        each for each in gpus() if each.process_index == jax.process_index()
    ]
    jax.local_device_count = lambda backend=None: len(jax.local_devices())
    jax.device_count = lambda backend=None: len(gpus())
    jax.default_backend = lambda: name if _asks() else default()


def _nccl() -> None:
    from lockstep.core import shared_gpu

    shared_gpu.nccl_version = version_of_nccl


AFTER = {"jax": _pretend, "lockstep.core.shared_gpu": _nccl}
