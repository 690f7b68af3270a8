"""JAX's devices, and virtual ones on the CPU."""

import os

import jax

from lockstep.devices import Device, check_visible, names_in_words, rehearsed_devices
from lockstep.errors import RehearsalTooLate


def list_devices() -> tuple[Device, ...]:
    """The devices JAX has, those of its default backend first.

    Raises:
        RehearsalTooLate: If a rehearsal is asked for and not in force.
        DeviceError: If `CUDA_VISIBLE_DEVICES` was set too late.
    """
    found = jax.devices()
    if found[0].platform != "cpu":
        found = [*found, *jax.devices("cpu")]
    here = tuple(_describe(device) for device in found)
    check_visible(here, os.environ)
    asked = rehearsed_devices(os.environ)
    if asked and (here[0].platform != "cpu" or jax.local_device_count() != asked):
        raise RehearsalTooLate(_too_late(asked, here))
    return here


def find(names: tuple[str, ...]) -> list[jax.Device]:
    """JAX's own objects for device names, in their order."""
    platform = names[0].split(":")[0]
    by_name = {_describe(device).name: device for device in jax.devices(platform)}
    return [by_name[name] for name in names]


def make_virtual(count: int) -> None:
    """Make `count` virtual CPU devices, and hide accelerators.

    Raises:
        RehearsalTooLate: If JAX has started with other devices.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:  # JAX has started; its devices are what they are
        here = tuple(_describe(device) for device in jax.devices())
        if here[0].platform != "cpu" or len(here) != count:
            raise RehearsalTooLate(_too_late(count, here)) from None


def _describe(device: jax.Device) -> Device:
    stats = device.memory_stats() if device.platform != "cpu" else None
    return Device(
        name=f"{device.platform}:{device.id}",
        kind=device.device_kind,
        memory=(stats or {}).get("bytes_limit"),
    )


def _too_late(asked: int, here: tuple[Device, ...]) -> str:
    return (
        f"A rehearsal on {asked} virtual CPU devices was asked for, and JAX has started with "
        f"{len(here)}: {names_in_words([device.name for device in here])}.\n"
        "Devices are fixed at the first operation. Set "
        f"LOCKSTEP_REHEARSE={asked} before Python starts\n(or call "
        f"lockstep.rehearse(devices={asked}) before the first Keras operation)."
    )
