"""TensorFlow's devices, and virtual CPU devices."""

import os
from functools import cache
from typing import Any

import tensorflow as tf

from lockstep.core.devices import Device, check_visible, rehearsed_devices
from lockstep.core.rehearsal_error import rehearsal_too_late
from lockstep.core.shared_gpu import SHARE_GPU, shares_of_gpu
from lockstep.errors import UnsupportedBackend


def list_devices() -> tuple[Device, ...]:
    """Return the devices of TensorFlow, accelerators first.

    Raises:
        RehearsalTooLate: If a rehearsal is requested after TensorFlow has started.
        DeviceError: If `CUDA_VISIBLE_DEVICES` was set too late.
        UnsupportedBackend: If one GPU is to be several devices.
    """
    asked = rehearsed_devices(os.environ)
    if asked:
        make_virtual(asked, by_environment=True)
    elif shares_of_gpu(os.environ) is not None:
        raise UnsupportedBackend(
            f"{SHARE_GPU}={os.environ[SHARE_GPU]} was set, but on TensorFlow a GPU can only be "
            "one device.\n"
            "Set KERAS_BACKEND=torch, or use jax with lockstep run, or unset the variable."
        )
    here = tuple(_describe(device) for kind in ("GPU", "CPU") for device in _logical(kind))
    check_visible(here, os.environ)
    return here


def make_virtual(count: int, *, by_environment: bool = False) -> None:
    """Make `count` virtual CPU devices and hide accelerators.

    Args:
        count: The number of devices.
        by_environment: Whether `LOCKSTEP_REHEARSE` asks for them, which the error then names.

    Raises:
        RehearsalTooLate: If TensorFlow has started with other devices.
    """
    try:
        (cpu,) = tf.config.list_physical_devices("CPU")
        parts = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        if tf.config.get_logical_device_configuration(cpu) != parts:
            tf.config.set_logical_device_configuration(cpu, parts)
        tf.config.set_visible_devices([], "GPU")
    except RuntimeError:  # TensorFlow has started, and its devices are fixed
        here = tuple(_describe(device) for kind in ("GPU", "CPU") for device in _logical(kind))
        if here[0].platform != "cpu" or len(here) != count:
            raise rehearsal_too_late(
                "TensorFlow", count, here, by_environment=by_environment
            ) from None


def _logical(kind: str) -> list[Any]:
    devices: list[Any] = tf.config.list_logical_devices(kind)
    return devices


def _describe(device: Any) -> Device:
    platform, number = device.device_type.lower(), device.name.rsplit(":", 1)[1]
    return Device(name=f"{platform}:{number}", kind=_kind(platform, int(number)))


def _kind(platform: str, number: int) -> str:
    physical = tf.config.list_physical_devices(platform.upper())
    if platform == "cpu" or number >= len(physical):
        return platform
    details = tf.config.experimental.get_device_details(physical[number])
    return str(details.get("device_name", platform))


def exchanged(values: Any, source: str, target: str) -> tuple[Any, Any]:
    """Copy integers from one device to another, and sum them over both; see `doctor.CopyAndSum`."""
    with tf.device(source):
        given = tf.identity(tf.constant(values))
    with tf.device(target):
        copy = tf.identity(given)
    _, total = _sums(source, target)(given)
    return copy.numpy(), total.numpy()


@cache
def _sums(source: str, target: str) -> Any:
    """Return a function that sums a tensor of two replicas, and returns what each of them has.

    TensorFlow leaves out an operation whose result nothing needs, and the sum of one replica waits
    for that of the other one.
    """
    strategy = tf.distribute.MirroredStrategy([source, target])

    def summed(given: Any) -> Any:
        replica = tf.distribute.get_replica_context()
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(given))

    def run(given: Any) -> Any:
        return strategy.experimental_local_results(strategy.run(summed, (given,)))

    return tf.function(run)
