"""XLA's options for the training step, program by program.

Left to itself, XLA for GPUs sums the gradients over the devices in buckets of up to 30 MiB,
so a model whose gradients fit into one begins when its backward pass is over; and for some
GPUs (A100s, say) it waits for each bucket where it starts it. Either way devices communicate
while nothing is computed (docs/performance.md). What is summed stays the same.
"""

import functools
import os
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import SingleDeviceSharding

SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
BUCKET = "xla_gpu_all_reduce_combine_threshold_bytes"
OWN = 30 * 2**20
"""XLA's own choice of a bucket, openxla/xla: xla/debug_options_flags.cc."""
LEAST = 2**20
"""Smaller buckets would add all-reduces that take hardly less time; PyTorch's smallest is the
size of this one. No measurement on GPUs stands behind it yet."""
BUCKETS = 8
"""How many there are to be, where XLA's own would be one or two: with more of its own, a
model gained nothing (docs/performance.md)."""

OUT = "LOCKSTEP_XLA_OPTIONS"
"""Set to `off`, this environment variable leaves XLA's options to XLA."""


def options(devices: Sequence[jax.Device], gradient_bytes: int) -> dict[str, int | bool] | None:
    """Options for `jax.jit` of a step that sums so many bytes of gradients over devices.

    They decide when what is sent, and never what is computed. An option that this XLA does
    not know, or one that the user has set in `XLA_FLAGS`, is left out.

    Args:
        devices: Those of the mesh.
        gradient_bytes: Of all trainable variables together; 0 for a step without gradients.

    Returns:
        Options by name, `None` where there are none.
    """
    if len(devices) < 2:
        return None
    chosen = choice(devices[0].platform, gradient_bytes, os.environ)
    # Each process asks for a device of its own; the answer is that of all of them.
    mine = next(device for device in devices if device.process_index == jax.process_index())
    return {name: value for name, value in chosen.items() if _is_known(mine, name, value)} or None


def choice(platform: str, gradient_bytes: int, environ: Mapping[str, str]) -> dict[str, int | bool]:
    """The same options for two devices or more, as if every XLA knew them.

    Example:
        >>> choice("gpu", 400 * 2**20, {})
        {'xla_gpu_enable_latency_hiding_scheduler': True}
        >>> choice("cpu", 16 * 2**20, {})
        {}
    """
    if platform != "gpu" or not gradient_bytes or environ.get(OUT) == "off":
        return {}
    chosen: dict[str, int | bool] = {SCHEDULER: True}
    if LEAST < gradient_bytes <= 2 * OWN:
        chosen[BUCKET] = max(gradient_bytes // BUCKETS, LEAST)
    flags = environ.get("XLA_FLAGS", "")
    return {name: value for name, value in chosen.items() if f"--{name}" not in flags}


@functools.cache
def _is_known(device: jax.Device, name: str, value: int | bool) -> bool:
    """Whether the compiler for this device takes the option: it refuses one it does not know."""
    nothing = jax.ShapeDtypeStruct((), "float32", sharding=SingleDeviceSharding(device))
    program = jax.jit(lambda value: value, compiler_options={name: value})
    try:
        program.lower(nothing).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
