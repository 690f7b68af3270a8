"""Rehearsal: many virtual devices on one CPU."""

import os
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from lockstep.core.devices import REHEARSE, count_to_rehearse, rehearsed_devices
from lockstep.errors import DeviceError, RehearsalTooLate


def rehearse(devices: int) -> None:
    """Make virtual CPU devices in this process, to try a script without the hardware.

    The results are those of as many real devices. The speed is not, because virtual devices
    share the cores. Accelerators are hidden. The call has to come before the first Keras
    operation. Processes that this process starts have the same virtual devices. Setting
    `LOCKSTEP_REHEARSE=4` in the environment has the same effect when lockstep is imported.

    On JAX, the call sets `PJRT_NPROC`, the number of XLA's threads, to at least four for each
    device. With fewer threads the devices may wait for one another.

    Args:
        devices: The number of virtual devices, at least 1.

    Raises:
        RehearsalTooLate: If the backend has already started with other devices.
        DeviceError: If `devices` is not a whole number of at least 1.
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
    """Make the virtual devices that `LOCKSTEP_REHEARSE` asks for.

    JAX and PyTorch are not imported: variables are set that they, or Keras, read at their
    import. TensorFlow reads no such variable, and is imported if Keras runs on it.

    A framework that has already started, or a wrong value, raises no error here: `import
    lockstep` has to work in every command. The first call that needs the devices raises it.
    """
    try:
        count = rehearsed_devices(environ)
    except DeviceError:
        return
    if count is None:
        return
    backend, _ = choose_backend(environ)
    if backend == "torch":
        # keras/src/backend/torch/core.py reads it at the import of Keras
        environ["KERAS_TORCH_DEVICE"] = "cpu"
    if backend == "tensorflow":
        # It may be missing: Keras chooses it by default.
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
        from lockstep.core.xla_threads import give_threads

        environ["JAX_NUM_CPU_DEVICES"] = str(count)
        environ["JAX_PLATFORMS"] = "cpu"
        give_threads(environ, count)


def choose_backend(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the backend that Keras has in this environment, and the source of the choice.

    Keras is not imported: it would write its file of settings. If this process has imported it,
    the backend is the one that it runs on.
    """
    import json

    keras = sys.modules.get("keras")
    if environ is os.environ and keras is not None and hasattr(keras, "config"):
        return keras.config.backend(), "the Keras that is imported"
    if environ.get("KERAS_BACKEND"):
        return environ["KERAS_BACKEND"], "KERAS_BACKEND"
    # keras/src/backend/config.py
    file = Path(environ.get("KERAS_HOME") or "~/.keras").expanduser() / "keras.json"
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError):
        settings = None
    if isinstance(settings, dict) and settings.get("backend"):
        return str(settings["backend"]), f"{file} (Keras wrote it at its first import)"
    return "tensorflow", "Keras's default"
