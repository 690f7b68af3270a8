"""The functions that distribute a model, release it, declare a layer, and list devices."""

import operator
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

from lockstep.core.devices import REPLICATED, SHARDED, parse_devices
from lockstep.core.status import STATUS_OF_PROCESS
from lockstep.core.tried_versions import untried
from lockstep.engines import current_engine
from lockstep.errors import DeviceError, NotAModel, NothingToDoWarning, shown
from lockstep.initialize import join

Model = TypeVar("Model")
Declared = TypeVar("Declared")

Devices = int | str | Sequence[int] | Sequence[str]
"""The types that `devices=` accepts, besides `None`."""


def distribute(
    model: Model,
    devices: Devices | None = None,
    *,
    state: str = REPLICATED,
    same_random_numbers: bool = False,
    micro_batch_size: int | None = None,
) -> Model:
    """Make a Keras model train, evaluate and predict on several devices, in place.

    One training step over all devices equals that step on one device, for every batch size.
    Loss, metrics, weights and optimizer state are the same, up to rounding. The call returns
    the same object, and the files that it saves are plain files of one device.

    The model may be built or not, and compiled or not. It can be compiled, and weights can be
    loaded, at any time. A second call moves the model to other devices. If the call fails, the
    model does not change. Processes of a launcher (`lockstep run`, torchrun, Slurm) train one
    model together; see `initialize`.

    Args:
        model: A `keras.Model`, of any kind.
        devices: The number of devices (`4` means the first four), or the devices themselves
            (`[0, 2]`, `"gpu:0,gpu:1"`, `["gpu:0", "gpu:1"]`). `None` means all devices of
            the default platform.
        state: `"replicated"`: each device has all weights and optimizer slots. `"sharded"`:
            each device has a part of each large one, for a model that does not fit one device.
            TensorFlow cannot shard.
        same_random_numbers: Whether dropout and other random layers draw what one device draws.
            On JAX and TensorFlow they do in any case. On PyTorch, each device draws its own
            numbers by default; with `True`, each one draws those of all rows and uses its own,
            which takes longer.
        micro_batch_size: The most rows that a device runs through the layers at once, for a batch
            that does not fit its memory, also with one device. `fit(batch_size=256)` still updates
            the weights by the gradient of 256 rows. A training step computes the forward pass
            twice. What looks across rows inside the model, such as a batch norm that trains, is
            refused, and so is TensorFlow.

    Returns:
        The same `model`.

    Raises:
        DeviceError: If `devices` names an unknown device, one device twice, or more devices
            than there are; if `state` is unknown; or if `micro_batch_size` is no number of rows.
        TypeError: If `same_random_numbers` is no `bool`.
        NotAModel: If `model` is not a Keras model.
        UnsupportedBackend: If there is no engine for Keras's backend, it cannot shard, or it
            runs all rows of a device at once.
        UnsupportedModel: If the engine cannot keep this model exact.
        LayoutConflict: If another tool has laid out a variable of the model, or the model
            shares a variable with a model on other devices.
        ProcessesDisagree: If the processes of a launcher cannot join, or ask for different
            devices.

    Example:
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> lockstep.distribute(model, devices=4) is model
        True
    """
    check_model(model)
    check_state(state)
    if not isinstance(same_random_numbers, bool):
        raise TypeError(
            f"same_random_numbers={same_random_numbers!r} was requested, but only True and "
            "False are possible.\n"
            "Pass True to draw the same random numbers as one device, or remove the argument."
        )
    rows = check_micro_batch_size(micro_batch_size)
    engine = current_engine()
    join(engine)
    names = parse_devices(devices, engine.devices())
    if state == SHARDED and len(names) == 1:
        state = REPLICATED
        warnings.warn(
            f'state="sharded" has no effect on one device: {names[0]} has the whole state.\n'
            "Pass two or more devices, or remove the argument.",
            NothingToDoWarning,
            stacklevel=2,
        )
    from lockstep.attach.attachment import attach  # which imports Keras
    from lockstep.core.layout import DataParallel

    _say_untried(engine.name, getattr(sys.modules.get(engine.name), "__version__", ""))
    attach(engine, model, DataParallel(names, state, same_random_numbers, rows))
    STATUS_OF_PROCESS.distributed = True
    return model


@cache
def _say_untried(framework: str, version: str) -> None:
    """Print a line, once in a process, if a framework is newer than any that was tried."""
    from lockstep.processes.process_group import is_first

    line = untried(framework, version)
    if line and is_first():
        print(f"lockstep: {line}", flush=True)


def release(model: Model) -> Model:
    """Make a distributed model run on one device again, in place.

    Weights, optimizer state and compilation do not change. A model that is not distributed
    does not change at all.

    Args:
        model: A `keras.Model`.

    Returns:
        The same `model`.

    Raises:
        NotAModel: If `model` is not a Keras model.
        UnsupportedBackend: If there is no engine for Keras's backend.

    Example:
        >>> lockstep.release(lockstep.distribute(model, devices=4)) is model
        True
    """
    check_model(model)
    from lockstep.attach.attachment import detach

    detach(model)
    return model


def multi_gpu_model(
    model: Model,
    gpus: int | Sequence[int] | None = None,
    cpu_merge: bool = True,
    cpu_relocation: bool = False,
) -> Model:
    """Distribute a model with the arguments of the old `keras.utils.multi_gpu_model`.

    The call is `distribute(model, devices=gpus)`. It returns the same model, and makes no
    second one: both names train, save and load the same weights.

    Args:
        model: A `keras.Model`.
        gpus: The number of devices, or a list of device numbers; `None` means all. One
            device is allowed. In a rehearsal the devices are virtual.
        cpu_merge: Has no effect, because outputs are not merged.
        cpu_relocation: Has no effect, because every device holds the weights.

    Returns:
        The same `model`.

    Raises:
        DeviceError: If `gpus` names an unknown device, one device twice, or more devices than
            there are.
        NotAModel: If `model` is not a Keras model.
        UnsupportedBackend: If there is no engine for Keras's backend.

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
                f"{name}={value} has no effect: every device holds the weights, and outputs are "
                "not merged.\nRemove the argument; the result is the same.",
                NothingToDoWarning,
                stacklevel=2,
            )
    return distribute(model, gpus)


@contextmanager
def sharded(devices: Devices | None = None) -> Iterator[None]:
    """Build and load a model in shards, if it does not fit one device.

    Each large variable that is made in the context goes to its shards at once, with the initial
    value that it has on one device. On PyTorch it goes to the host, and to its shards when the
    model is distributed. No device holds more than its part and one variable. Weights that are
    loaded, in the context or after it, go there too. Then call
    `lockstep.distribute(model, devices, state="sharded")` to train the model.

    Args:
        devices: As in `lockstep.distribute`.

    Raises:
        DeviceError: If `devices` names an unknown device, one device twice, or more devices
            than there are.
        UnsupportedBackend: If the engine of Keras's backend cannot shard.

    Returns:
        A context.

    Example:
        >>> with lockstep.sharded(devices=4):
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        >>> model = lockstep.distribute(model, devices=4, state="sharded")
    """
    engine = current_engine()
    join(engine)
    with engine.made_in_shards(parse_devices(devices, engine.devices())):
        yield


def devices() -> list[str]:
    """Return the names of the available devices, those of the default platform first.

    `devices=` accepts each of these names. The call starts the backend. A rehearsal has to be
    set up before that.

    Returns:
        A list of names.

    Raises:
        DeviceError: If `LOCKSTEP_REHEARSE` is set, and is not a whole number of at least 1.
        RehearsalTooLate: If it was set after the backend had started.
        UnsupportedBackend: If no engine serves Keras's backend yet.

    Example:
        >>> lockstep.devices()[0]
        'cpu:0'
    """
    return [device.name for device in current_engine().devices()]


def check_model(model: object) -> None:
    """Raise `NotAModel` for anything but a Keras model."""
    import keras

    legacy = _legacy_keras(model)
    if legacy is not None:
        raise NotAModel(
            f"A Keras 3 model was expected, but got a model of {legacy}, which is Keras 2.\n"
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
        f"A Keras model was expected, but got {got}.\n"
        "Pass an instance of keras.Model: Sequential, functional or subclassed."
    )


def check_state(state: str) -> None:
    """Raise `DeviceError` for any `state=` but those that `distribute` knows."""
    if not isinstance(state, str) or state not in (REPLICATED, SHARDED):
        raise DeviceError(
            f'state={shown(state)} was given, but the state must be "replicated" or "sharded".\n'
            'Pass state="sharded", or remove the argument.'
        )


def check_micro_batch_size(size: object) -> int | None:
    """Raise `DeviceError` for any `micro_batch_size=` but `None` and a number of rows."""
    if size is None:
        return None
    try:
        rows = 0 if isinstance(size, bool) else operator.index(size)  # type: ignore[arg-type]
    except TypeError:
        rows = 0
    if rows < 1:
        raise DeviceError(
            f"micro_batch_size={shown(size)} was given, but a whole number of at least 1 was "
            "expected.\nPass the most rows that a device may run at once, such as 32, or remove "
            "the argument."
        )
    return rows


def _legacy_keras(model: object) -> str | None:
    """Return the package of Keras 2 that a model or class comes from, or `None`."""
    cls = model if isinstance(model, type) else type(model)
    for base in cls.__mro__:
        for package in ("tf_keras", "tensorflow.python.keras"):
            if base.__module__.startswith(f"{package}."):
                return package
    return None


def rowwise(layer: Declared) -> Declared:
    """Declare that a layer, loss or metric function works row by row.

    Each row of every output then depends on the same row of the inputs alone, in training
    and in inference. Engines with a copy of the model on each device split such a layer, and
    do not examine its code. A wrong declaration gives wrong numbers; `lockstep.verify` finds
    them.

    Args:
        layer: A Keras layer, a class of layers, or a function of targets and outputs.

    Returns:
        The same object, so that the function is usable as a decorator.

    Raises:
        NotAModel: If the object is no layer, class or function, or is one of Python's own.

    Example:
        >>> class Doubled(keras.layers.Layer):
        ...     def call(self, x):
        ...         return x * 2
        >>> lockstep.rowwise(Doubled) is Doubled
        True
    """
    try:
        layer._lockstep_rowwise = True  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise NotAModel(
            f"{shown(layer)} cannot be declared row-wise: it is not a layer, loss or metric.\n"
            "Pass a Keras layer, a class of layers, or a function that is written in Python."
        ) from None
    return layer
