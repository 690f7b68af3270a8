"""The front door: distribute, release, multi_gpu_model, devices."""

import contextlib
import operator
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

from lockstep.devices import parse_devices
from lockstep.engines import current_engine
from lockstep.engines.engine import InputOptions
from lockstep.errors import NotAModel, NothingToDoWarning, UnusableData
from lockstep.initialize import join
from lockstep.launch.status import STATUS_OF_PROCESS

Model = TypeVar("Model")

Devices = int | str | Sequence[int] | Sequence[str]
"""What `devices=` accepts, besides `None`."""


def distribute(
    model: Model,
    devices: Devices | None = None,
    *,
    data_on_devices: bool = False,
    prefetch: int = 0,
) -> Model:
    """Make a Keras model train, evaluate and predict on several devices, in place.

    One training step over all devices equals that step on one device: the same
    loss, metrics, weights and optimizer state, to rounding, for every batch size.
    The object stays the same; what it saves is a plain single-device file. The
    model may be built or not, compiled or not, and be compiled or loaded into
    later. Distributing again to other devices moves it. On failure it stays as it
    was. Processes that a launcher has started (`lockstep run`, torchrun, Slurm) train one
    model together; see `initialize`.

    Args:
        model: A `keras.Model`, of any kind.
        devices: How many (`4`: the first four), which (`[0, 2]`, `"gpu:0,gpu:1"`,
            `["gpu:0", "gpu:1"]`), or `None` for all devices of the default
            platform.
        data_on_devices: Whether every device keeps the NumPy arrays handed to `fit`, and
            batches are gathered there. Where that cannot be, a warning says why batches go
            from the host.
        prefetch: How many batches a background thread makes ready before their turn. Code of
            yours that makes batches then runs early, and beside the training. The batches
            take memory of the host. None is made past the end of an epoch of known length.

    Returns:
        The same `model`.

    Raises:
        DeviceError: If `devices` cannot be followed: unknown, twice, or too many.
        NotAModel: If `model` is no Keras model.
        UnusableData: If `prefetch` is no whole number of at least 0, or `data_on_devices`
            no truth value.
        UnsupportedBackend: If no engine serves Keras's backend yet, or the engine does
            not keep data on devices, or make batches ready.
        UnsupportedModel: If the engine could not keep this model exact.
        LayoutConflict: If another tool, or another model on other devices, has
            laid out one of its variables.
        ProcessesDisagree: If a launcher started several processes, and they cannot join; or if
            they ask for different devices.

    Example:
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> lockstep.distribute(model, devices=4) is model
        True
    """
    check_model(model)
    options = InputOptions(_checked_stay(data_on_devices), _checked_ahead(prefetch))
    engine = current_engine()
    join(engine)
    engine.attach(model, parse_devices(devices, engine.devices()), options)
    STATUS_OF_PROCESS.distributed = True
    return model


def release(model: Model) -> Model:
    """Make a distributed model run on one device again, in place.

    Its weights, optimizer state and compilation stay. A model that is not
    distributed is left alone.

    Args:
        model: A `keras.Model`.

    Returns:
        The same `model`.

    Raises:
        NotAModel: If `model` is no Keras model.
        UnsupportedBackend: If no engine serves Keras's backend yet.

    Example:
        >>> lockstep.release(lockstep.distribute(model, devices=4)) is model
        True
    """
    check_model(model)
    current_engine().detach(model)
    return model


def multi_gpu_model(
    model: Model,
    gpus: int | Sequence[int] | None = None,
    cpu_merge: bool = True,
    cpu_relocation: bool = False,
) -> Model:
    """The old `keras.utils.multi_gpu_model`, as a drop-in; see `distribute`.

    The model returned is the one handed over: there is no parallel model, so
    either name trains, saves and loads the same weights, as plain files.

    Args:
        model: A `keras.Model`.
        gpus: How many devices, or a list of their numbers; `None` for all. One
            device is allowed. Under `lockstep.rehearse` these are virtual devices.
        cpu_merge: Had a meaning where outputs were merged on a device; now nothing
            is merged, and either value gives the same.
        cpu_relocation: Had a meaning where weights lived on one device; now every
            device has them, and either value gives the same.

    Returns:
        The same `model`.

    Raises:
        DeviceError: If `gpus` cannot be followed: unknown, twice, or too many.
        NotAModel: If `model` is no Keras model.
        UnsupportedBackend: If no engine serves Keras's backend yet.

    Example:
        >>> parallel_model = lockstep.multi_gpu_model(model, gpus=4)
        >>> parallel_model is model
        True
    """
    for name, value, usual in (
        ("cpu_merge", cpu_merge, True),
        ("cpu_relocation", cpu_relocation, False),
    ):
        if bool(value) is not usual:
            warnings.warn(
                f"{name}={value} has nothing to do any more: each device holds the weights, and "
                "no output is merged on the way. The result is the same without it.",
                NothingToDoWarning,
                stacklevel=2,
            )
    return distribute(model, gpus)


def devices() -> list[str]:
    """The names of the devices that are here, those of the default platform first.

    Each is a name that `devices=` accepts. Asking starts the backend, after which
    a rehearsal can no longer be set up.

    Returns:
        A list of these names.

    Raises:
        DeviceError: If `LOCKSTEP_REHEARSE` is set and holds no whole number of at least 1.
        RehearsalTooLate: If it is set and could not be followed.
        UnsupportedBackend: If no engine serves Keras's backend yet.

    Example:
        >>> lockstep.devices()[0]
        'cpu:0'
    """
    return [device.name for device in current_engine().devices()]


def _checked_stay(data_on_devices: object) -> bool:
    if isinstance(data_on_devices, bool):
        return data_on_devices
    raise UnusableData(
        f"data_on_devices={data_on_devices!r} was given, and it is True or False.\n"
        "Leave it out, and batches go from the host."
    )


def _checked_ahead(prefetch: Any) -> int:
    with contextlib.suppress(TypeError):
        number = operator.index(prefetch)  # NumPy's whole numbers too
        if number >= 0 and not isinstance(prefetch, bool):
            return number
    raise UnusableData(
        f"prefetch={prefetch!r} was given, and it is a number of batches: 0 or more.\n"
        "Leave it out, or give 2."
    )


def check_model(model: object) -> None:
    """Raise `NotAModel` for anything but a Keras model."""
    import keras

    legacy = _legacy_keras(model)
    if legacy is not None:
        raise NotAModel(
            f"A Keras 3 model was expected, and this is one of {legacy}, which is legacy Keras 2.\n"
            "Build it with `import keras`; where tf.keras is used, unset TF_USE_LEGACY_KERAS. "
            "For its weights,\n"
            "save them as .h5 with Keras 2, then lockstep.load_weights(model, file)."
        )
    if isinstance(model, type):
        got = f"the class {model.__name__}"
    elif isinstance(model, keras.layers.Layer) and hasattr(model, "train_step"):
        return
    else:
        got = f"a {type(model).__name__} object"
    raise NotAModel(
        f"A Keras model was expected, and this is {got}.\n"
        "Hand over an instance of keras.Model: Sequential, functional or subclassed."
    )


def _legacy_keras(model: object) -> str | None:
    """The package of Keras 2 that a model or class is from, `None` where it is from none."""
    cls = model if isinstance(model, type) else type(model)
    for base in cls.__mro__:
        for package in ("tf_keras", "tensorflow.python.keras"):
            if base.__module__.startswith(f"{package}."):
                return package
    return None
