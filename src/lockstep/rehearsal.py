"""Rehearsal: many virtual devices on one CPU."""

import os
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from lockstep.devices import REHEARSE, count_to_rehearse, rehearsed_devices
from lockstep.errors import DeviceError, RehearsalTooLate


def rehearse(devices: int) -> None:
    """Give this process virtual CPU devices, to try a script without the hardware.

    The numbers are those that as many real devices would give; the speed is not,
    because the virtual devices share the cores. Accelerators are hidden. Works
    before or after Keras is imported, as long as no operation has run, and reaches
    the processes started from this one. `LOCKSTEP_REHEARSE=4` in the environment
    does the same as soon as lockstep is imported.

    On JAX, `PJRT_NPROC` (the number of XLA's threads) is raised to four for each device where it is
    less: with fewer, the devices may wait for one another.

    Args:
        devices: How many, at least 1.

    Raises:
        RehearsalTooLate: If the backend has already started with other devices.
        DeviceError: If `devices` is no number of at least 1.
        UnsupportedBackend: If Keras runs on a backend without an engine.

    Example:
        >>> lockstep.rehearse(devices=8)
        >>> lockstep.devices()[:2]
        ['cpu:0', 'cpu:1']
    """
    from lockstep.engines import current_engine

    count = count_to_rehearse(devices, f"devices={devices!r}")
    current_engine().rehearse(count)
    os.environ[REHEARSE] = str(count)


def rehearse_from_environment(environ: MutableMapping[str, str]) -> None:
    """Follow `LOCKSTEP_REHEARSE`, without importing a framework.

    Where JAX is not imported yet, its own variables are set for when it is; they
    are read at its import, and so is Keras's own for PyTorch. TensorFlow reads none,
    so that it is imported here where Keras is told to run on it. Where a framework has
    already started, or the variable holds no number, nothing happens here, and the first
    call that needs the devices says so: a command that imports lockstep is to end in words.
    """
    try:
        count = rehearsed_devices(environ)
    except DeviceError:
        return
    if count is None:
        return
    backend = environ.get("KERAS_BACKEND") or written_backend(environ)
    if backend == "torch":
        # keras/src/backend/torch/core.py reads it at the import of Keras
        environ["KERAS_TORCH_DEVICE"] = "cpu"
    if backend == "tensorflow":
        # Keras writes its file by itself, and names TensorFlow where there is none, too.
        with suppress(RehearsalTooLate, ImportError):
            from lockstep.engines.tensorflow import devices as tensorflow_devices

            tensorflow_devices.make_virtual(count)
    if "jax" in sys.modules:
        from lockstep.engines.jax.devices import make_virtual

        try:
            make_virtual(count)
        except RehearsalTooLate:
            return
    else:
        from lockstep.engines.xla_threads import give_threads

        environ["JAX_NUM_CPU_DEVICES"] = str(count)
        environ["JAX_PLATFORMS"] = "cpu"
        give_threads(environ, count)


def written_backend(environ: Mapping[str, str]) -> str | None:
    """The backend in Keras's file of settings, which counts where the environment names none."""
    import json

    # keras/src/backend/config.py
    folder = Path(environ.get("KERAS_HOME") or "~/.keras").expanduser()
    try:
        settings = json.loads((folder / "keras.json").read_text())
    except (OSError, ValueError):
        return None
    return settings.get("backend") if isinstance(settings, dict) else None
