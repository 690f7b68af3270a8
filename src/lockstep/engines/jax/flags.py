"""XLA's options for the training step, for each program.

By default, XLA for GPUs sums the gradients over the devices in buckets of up to 30 MiB. If the
gradients of a model fit into one bucket, the sum begins after the backward pass. On some GPUs, such
as A100s, XLA waits for each bucket right after its start. In both cases devices communicate while
nothing is computed (docs/performance.md). The sums stay the same.
"""

import functools
import os
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import SingleDeviceSharding

SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
BUCKET = "xla_gpu_all_reduce_combine_threshold_bytes"
OWN = 30 * 2**20
"""XLA's default bucket size, openxla/xla: xla/debug_options_flags.cc."""
LEAST = 2**20
"""Smaller buckets would add all-reduces that are hardly faster. PyTorch's smallest bucket has
this size. It is not measured on GPUs yet."""
BUCKETS = 8
"""The number of buckets if XLA's default would be one or two. With more default buckets, a model
gained nothing (docs/performance.md)."""

SWITCH = "LOCKSTEP_XLA_OPTIONS"
"""The environment variable that enables the options with the value `on`."""


def options(devices: Sequence[jax.Device], gradient_bytes: int) -> dict[str, int | bool] | None:
    """Return options for `jax.jit` of a step that sums gradients over devices.

    They are off unless `LOCKSTEP_XLA_OPTIONS=on`: no GPU has shown a gain. They decide when data
    are sent, and never what is computed. An option is left out if this XLA does not know it or if
    the user has set it in `XLA_FLAGS`.

    Args:
        devices: The devices of the mesh.
        gradient_bytes: The size of all gradients; 0 for a step without gradients.

    Returns:
        Options by name; `None` if there are none.
    """
    if len(devices) < 2:
        return None
    chosen = choice(devices[0].platform, gradient_bytes, os.environ)
    # Each process checks a device of its own. The result is the same in all processes.
    mine = next(device for device in devices if device.process_index == jax.process_index())
    return {name: value for name, value in chosen.items() if _is_known(mine, name, value)} or None


def choice(platform: str, gradient_bytes: int, environ: Mapping[str, str]) -> dict[str, int | bool]:
    """Return the options for two or more devices, as if every XLA knew them.

    Example:
        >>> choice("gpu", 400 * 2**20, {"LOCKSTEP_XLA_OPTIONS": "on"})
        {'xla_gpu_enable_latency_hiding_scheduler': True}
        >>> choice("gpu", 400 * 2**20, {})
        {}
    """
    if platform != "gpu" or not gradient_bytes or environ.get(SWITCH) != "on":
        return {}
    chosen: dict[str, int | bool] = {SCHEDULER: True}
    if LEAST < gradient_bytes <= 2 * OWN:
        chosen[BUCKET] = max(gradient_bytes // BUCKETS, LEAST)
    flags = environ.get("XLA_FLAGS", "")
    return {name: value for name, value in chosen.items() if f"--{name}" not in flags}


@functools.cache
def _is_known(device: jax.Device, name: str, value: int | bool) -> bool:
    """Return whether the compiler for this device accepts the option."""
    nothing = jax.ShapeDtypeStruct((), "float32", sharding=SingleDeviceSharding(device))
    program = jax.jit(lambda value: value, compiler_options={name: value})
    try:
        program.lower(nothing).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
