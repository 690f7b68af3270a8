"""Threads enough for virtual devices."""

import os
from collections.abc import MutableMapping

_THREADS = "PJRT_NPROC"  # xla/pjrt/utils.cc, DefaultThreadPoolSize
_EACH = 4


def give_threads(environ: MutableMapping[str, str], devices: int) -> None:
    """Let XLA start threads for so many virtual CPU devices; before JAX has started.

    In an all-reduce a device holds one of XLA's threads until all others have come to it, and
    those need threads for what they compute before. XLA starts one for each core, or each
    device. On two cores, with JAX 0.10.2, steps of a three-layer network of 512 units over 4
    devices waited for one another until XLA ended the process, with 4 and with 5 threads; with
    8 for 4 devices, and 32 for 8, they ran. A smaller number that was set already is raised.
    """
    least = _EACH * devices
    try:
        enough = int(environ.get(_THREADS, "")) >= least
    except ValueError:
        enough = False
    if not enough:
        environ[_THREADS] = str(max(least, os.cpu_count() or 1))
