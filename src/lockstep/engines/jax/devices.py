"""JAX's devices, and virtual devices on the CPU."""

import os
from typing import Any

import jax
import numpy as np

from lockstep.core.devices import Device, check_visible, rehearsed_devices
from lockstep.core.rehearsal_error import rehearsal_too_late
from lockstep.core.shared_gpu import (
    SHARE_GPU,
    check_one_gpu,
    let_ranks_share,
    nccl_version,
    shares_of_gpu,
)
from lockstep.core.xla_threads import give_threads
from lockstep.errors import DeviceError, counted


def list_devices() -> tuple[Device, ...]:
    """Return JAX's devices, those of its default backend first.

    Raises:
        RehearsalTooLate: If a rehearsal is requested but not in effect.
        DeviceError: If `CUDA_VISIBLE_DEVICES` was set too late, or one GPU is to be shared
            otherwise than by one process for each share.
        UnsupportedBackend: If it is to be shared, and NCCL is too old.
    """
    found = jax.devices()
    if found[0].platform != "cpu":
        found = [*found, *_cpus()]
    here = tuple(_describe(device) for device in found)
    # The variable of this process says nothing of the devices of other processes.
    own = [each for each, device in zip(here, found, strict=True) if _is_own(device)]
    check_visible(own, os.environ)
    _check_share(own)
    asked = rehearsed_devices(os.environ)
    if asked and (here[0].platform != "cpu" or jax.local_device_count() != asked):
        raise rehearsal_too_late("JAX", asked, here, by_environment=True)
    return here


def find(names: tuple[str, ...]) -> list[jax.Device]:
    """Return JAX's device objects for device names, in order."""
    platform = names[0].split(":")[0]
    by_name = {_describe(device).name: device for device in jax.devices(platform)}
    return [by_name[name] for name in names]


def _check_share(own: list[Device]) -> None:
    """Check that this process has a share of a GPU, if one is to be shared."""
    shares = None if rehearsed_devices(os.environ) else shares_of_gpu(os.environ)
    if shares is None:
        return
    gpus, tpus = (sum(each.platform == kind for each in own) for kind in ("gpu", "tpu"))
    check_one_gpu(shares, gpus, tpus)
    if shares != jax.process_count():
        raise DeviceError(
            f"{SHARE_GPU}={shares} was set, and {counted(jax.process_count(), 'process')} "
            f"{'runs' if jax.process_count() == 1 else 'run'}, but on JAX each share of a GPU "
            "needs its own process.\n"
            f"Start the script with: lockstep run --processes {shares} SCRIPT"
        )
    let_ranks_share(os.environ, nccl_version())


def any_device() -> jax.Device:
    """Return a device for programs that are traced and never run."""
    return (_cpus() or jax.devices())[0]


def make_virtual(count: int) -> None:
    """Make `count` virtual CPU devices, and hide accelerators.

    Raises:
        RehearsalTooLate: If JAX has started with other devices.
    """
    try:
        give_threads(os.environ, count)
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:  # JAX has started; its devices are fixed
        here = tuple(_describe(device) for device in jax.devices())
        if here[0].platform != "cpu" or len(here) != count:
            raise rehearsal_too_late("JAX", count, here) from None


def _describe(device: jax.Device) -> Device:
    # JAX numbers the CPU devices of process 1 from 2048 on.
    is_cpu = device.platform == "cpu"
    number = jax.devices("cpu").index(device) if is_cpu else device.id
    # JAX has no statistics of CPUs, and refuses those of a device of another process.
    stats = device.memory_stats() if _is_own(device) and not is_cpu else None
    return Device(
        name=f"{device.platform}:{number}",
        kind=device.device_kind,
        memory=(stats or {}).get("bytes_limit"),
    )


def _is_own(device: jax.Device) -> bool:
    return bool(device.process_index == jax.process_index())


def _cpus() -> list[jax.Device]:
    try:
        return jax.devices("cpu")
    except RuntimeError:  # JAX_PLATFORMS names GPUs alone
        return []


def exchanged(values: Any, source: str, target: str) -> tuple[Any, Any]:
    """Copy integers from one device to another, and sum them over both; see `doctor.CopyAndSum`."""
    pair = find((source, target))
    copy = jax.device_put(jax.device_put(values, pair[0]), pair[1])
    mesh = jax.sharding.Mesh(np.array(pair), ("devices",))
    rows, whole = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for axes in (("devices",), ())
    )
    both = jax.device_put(np.stack([values, values]), rows)
    total = jax.jit(lambda held: held.sum(axis=0), out_shardings=whole)(both)
    (there,) = [part.data for part in total.addressable_shards if part.device == pair[1]]
    return np.asarray(copy), np.asarray(there)
