"""Several JAX processes that train one model together.

Every process runs the same script. Between calls each of them has the whole model on a
device of its own, so that whatever a script or a callback does with it is local; within
a step the same arrays are one array over all devices of all processes.
"""

import functools
import inspect
import os
import random
import zlib
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from lockstep.errors import ProcessesDisagree


def several() -> bool:
    """Whether JAX runs in more than one process."""
    count: int = jax.process_count()
    return count > 1


def is_first() -> bool:
    """Whether this is the process that writes files and prints."""
    index: int = jax.process_index()
    return index == 0


def check_started() -> None:
    """Raise where a launcher has started several processes and JAX knows of one.

    Each of them would train alone, on all rows.

    Raises:
        ProcessesDisagree: If that is so.
    """
    asked = os.environ.get("WORLD_SIZE", "")
    if jax.process_count() == 1 and asked.isdecimal() and int(asked) > 1:
        raise ProcessesDisagree(
            f"WORLD_SIZE={asked} processes were started, and JAX knows of one: each would train "
            "alone.\nCall jax.distributed.initialize(...) before the first Keras operation, "
            "with the address,\nWORLD_SIZE and RANK, or unset WORLD_SIZE to train in one process."
        )


def check_devices(devices: list[jax.Device]) -> None:
    """Raise where a process would have no part in a step.

    Raises:
        ProcessesDisagree: If `devices` leaves out one of those that are here.
    """
    if several() and set(devices) != set(jax.devices(devices[0].platform)):
        raise ProcessesDisagree(
            f"{len(devices)} devices were asked for, and {jax.device_count()} are in "
            f"{jax.process_count()} processes, all of which have to take part.\n"
            "Leave devices out, or start fewer processes."
        )


def put(value: Any, layout: NamedSharding) -> jax.Array:
    """An array that every process has whole, laid out over the devices of all."""
    value = local(value)
    if not layout.is_fully_replicated:
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, layout, lambda rows: host[rows])
    mine = [device for device in layout.mesh.devices.flat if device in layout.addressable_devices]
    copies = [jax.device_put(value, device) for device in mine]
    return jax.make_array_from_single_device_arrays(np.shape(value), layout, copies)


def local(value: Any) -> Any:
    """The copy that is on the first device of this process, of an array that every device has."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return value
    if not value.is_fully_replicated:
        raise ProcessesDisagree(
            f"An array of shape {value.shape} is spread over processes, none of which has it whole."
            "\nHand over host arrays with all rows; each process places those of its own devices."
        )
    return value.addressable_data(0)


def from_first(values: list[Any]) -> list[np.ndarray]:
    """The arrays of the first process, in every process."""
    return [_unpacked(value, got) for value, got in zip(values, _broadcast(values), strict=True)]


def share_random_numbers() -> None:
    """Let every process draw what the first one draws: the order of rows, say."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = np.random.get_state(legacy=False)
    mine = [
        np.array(words, "uint32"),
        np.asarray(state["state"]["key"], "uint32"),
        np.array([state["state"]["pos"], state["has_gauss"]], "int64"),
        np.array([state["gauss"]], "float64"),
    ]
    first_words, key, counts, cached = from_first(mine)
    random.setstate((version, tuple(int(word) for word in first_words), gauss))
    np.random.set_state(("MT19937", key, int(counts[0]), int(counts[1]), float(cached[0])))


def share_variables(variables: list[Any]) -> None:
    """Give every process the values that the first one has."""
    if variables:
        values = from_first([np.asarray(variable.value) for variable in variables])
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def check_same_run(found: str | None) -> None:
    """Raise where the processes would go on from different checkpoints.

    Args:
        found: The one that this process has found, `None` where there is none.

    Raises:
        ProcessesDisagree: If that is so.
    """
    check = zlib.crc32(repr(found).encode())
    every = multihost_utils.process_allgather(np.array([check], "uint32")).ravel()
    if np.any(every != every[0]):
        raise ProcessesDisagree(
            f"Process {jax.process_index()} would go on from {found}, and another one from another "
            "checkpoint:\nthey do not see the same folder. Give lockstep.Checkpoint one that all "
            "of them share."
        )


def is_told_to_leave(step: int) -> bool:
    """Whether one of several processes was sent SIGTERM, and this is the step they agreed on.

    JAX takes the signal from `jax.distributed.initialize` on, and lets the processes agree.

    Args:
        step: Counts the calls; every process makes them after the same steps.
    """
    config: Any = jax.config  # whose types leave its options out
    if not several() or not config.jax_enable_preemption_service:
        return False
    reached: bool = multihost_utils.reached_preemption_sync_point(step)
    return reached


def wait_for_all(name: str) -> None:
    """Return when every process has come here."""
    if several():
        multihost_utils.sync_global_devices(name)


def together(model: Any, hooks: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The methods that a model has where several processes train it: these, and more.

    Whatever reads a variable finds it in its own process; one process prints and writes
    files; and `fit` returns when all have done what they do.
    """
    methods = {name: hooks.get(name, getattr(model, name)) for name in _LOUD}
    if not is_first():
        methods = {name: _quiet(method) for name, method in methods.items()}
        methods |= {name: _nothing_written for name in _WRITING if hasattr(model, name)}
    methods["fit"] = _in_step_with_all(methods["fit"])
    return {**hooks, **methods, "jax_state_sync": _synced_here(model, model.jax_state_sync)}


_LOUD = ("fit", "evaluate", "predict")
_WRITING = ("save", "save_weights", "export")
_GROUPS = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)


def _synced_here(model: Any, sync: Callable[[], None]) -> Callable[[], None]:
    # keras/src/backend/jax/trainer.py, JAXTrainer.jax_state_sync
    def jax_state_sync() -> None:
        state = getattr(model, "_jax_state", None)
        if state and not model._jax_state_synced:
            groups = {name: state.get(name, None) for name in _GROUPS}
            vars(model)["_jax_state"] = {
                name: [local(value) for value in group]
                for name, group in groups.items()
                if group is not None
            }
        sync()

    return jax_state_sync


def _in_step_with_all(fit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fit)
    def fit_together(*args: Any, **kwargs: Any) -> Any:
        share_random_numbers()
        history = fit(*args, **kwargs)
        wait_for_all("lockstep fit")
        return history

    return fit_together


def _quiet(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, without words, and without callbacks that write."""

    @functools.wraps(method)
    def quiet_method(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(method).bind(*args, **kwargs)
        bound.arguments["verbose"] = 0
        if "callbacks" in bound.arguments:
            bound.arguments["callbacks"] = _that_do_not_write(bound.arguments["callbacks"])
        return method(*bound.args, **bound.kwargs)

    return quiet_method


def _nothing_written(*_: Any, **__: Any) -> None:
    """In the place of what writes a file, in every process but the first."""


def _that_do_not_write(callbacks: Any) -> Any:
    if callbacks is None or isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    writing = (
        keras.callbacks.CSVLogger,
        keras.callbacks.TensorBoard,
        keras.callbacks.RemoteMonitor,
        keras.callbacks.ProgbarLogger,
    )
    return [
        _RestoreOnly(callback)
        if isinstance(callback, keras.callbacks.BackupAndRestore)
        else callback
        for callback in keras.tree.flatten(callbacks)
        if not isinstance(callback, writing)
    ]


class _RestoreOnly(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """`BackupAndRestore` without the backup."""

    def __init__(self, backup: Any) -> None:
        super().__init__()
        self._backup = backup

    def on_train_begin(self, logs: Any = None) -> None:
        self._backup.set_model(self.model)
        self._backup.on_train_begin(logs)


def _broadcast(values: list[Any]) -> list[np.ndarray]:
    # As bytes: the broadcast is a sum, which would cut 64 bits to 32 and lose the sign of zero.
    packed = [np.asarray(value).reshape(-1).view("uint8") for value in values]
    got = multihost_utils.broadcast_one_to_all(packed)
    return [np.asarray(part) for part in got]


def _unpacked(value: Any, got: np.ndarray) -> np.ndarray:
    like = np.asarray(value)
    return np.frombuffer(got.tobytes(), like.dtype).reshape(like.shape)
