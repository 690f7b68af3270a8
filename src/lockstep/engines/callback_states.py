"""The states of callbacks: of Keras's own, and of any that has `get_state` and `set_state`."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

# What each of Keras's callbacks changes while it runs: keras/src/callbacks/*.py
_CHANGED: dict[str, tuple[str, ...]] = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": (
        "best",
        "_current_epoch",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
    "TensorBoard": ("_global_train_batch", "_global_test_batch", "_previous_epoch_iterations"),
    "History": ("history", "epoch"),
}
_WITHOUT_STATE = (
    "LambdaCallback",
    "LearningRateScheduler",
    "ProgbarLogger",
    "RemoteMonitor",
    "SwapEMAWeights",
    "TerminateOnNaN",
)


def states_of(callbacks: list[Any]) -> list[dict[str, Any]]:
    """The state of each callback, beside the name of its class."""
    return [
        {"class": type(each).__name__, "state": _state_of(each)}
        for each in callbacks
        if not _is_without_state(each)
    ]


def put_states(callbacks: list[Any], states: list[dict[str, Any]]) -> list[str]:
    """Set what `states_of` gave, to the first callback of the same class each.

    Returns:
        What a user has to know, in words.
    """
    left = list(states)
    words = []
    for callback in callbacks:
        if _is_without_state(callback):
            continue
        name = type(callback).__name__
        written = next((each for each in left if each["class"] == name), None)
        if written is None:
            words.append(f"{name} is new, and begins anew")
            continue
        left.remove(written)
        if _keeps_own(callback):
            callback.set_state(written["state"])
        elif written["state"] is not None:
            _put_state(callback, written["state"])
        else:
            words.append(f"{name} has no get_state and set_state, and begins anew")
    return words + [f"{each['class']} is gone" for each in left]


def less_is_better(model: Any, monitor: str, mode: str) -> bool:
    """Whether a smaller value of what is monitored is better, as Keras's callbacks have it."""
    if mode != "auto":
        return mode == "min"
    # keras/src/callbacks/monitor_callback.py, MonitorCallback._set_monitor_op
    asked = keras.callbacks.EarlyStopping(monitor)
    asked.set_model(model)
    asked._set_monitor_op()
    return bool(asked.monitor_op is keras.ops.less)


@contextmanager
def appending(callbacks: list[Any]) -> Iterator[None]:
    """While it lasts, every `CSVLogger` goes on with its file rather than begin it."""
    loggers = [each for each in callbacks if isinstance(each, keras.callbacks.CSVLogger)]
    before = [logger.append for logger in loggers]
    for logger in loggers:
        logger.append = True
    try:
        yield
    finally:
        for logger, append in zip(loggers, before, strict=True):
            logger.append = append


def _is_without_state(callback: Any) -> bool:
    return type(callback) in _classes(_WITHOUT_STATE)


def _keeps_own(callback: Any) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _state_of(callback: Any) -> Any:
    if _keeps_own(callback):
        return callback.get_state()
    if isinstance(callback, keras.callbacks.CSVLogger):
        return _log_of(callback)
    names = [name for base in type(callback).__mro__ for name in _CHANGED.get(base.__name__, ())]
    if not names or not isinstance(callback, tuple(_classes(_CHANGED))):
        return None
    return {name: _copied(getattr(callback, name)) for name in names if hasattr(callback, name)}


def _put_state(callback: Any, state: dict[str, Any]) -> None:
    if isinstance(callback, keras.callbacks.CSVLogger):
        _cut_log(callback, state)
        return
    for name, value in state.items():
        setattr(callback, name, value)


def _log_of(logger: Any) -> dict[str, Any]:
    file = logger.csv_file
    return {"bytes": file.tell() if file is not None else 0, "keys": logger.keys}


def _cut_log(logger: Any, state: dict[str, Any]) -> None:
    """Take rows away that the log has from after the checkpoint."""
    # keras/src/callbacks/csv_logger.py: opened to append by now.
    if os.path.getsize(logger.filename) >= state["bytes"]:
        os.truncate(logger.filename, state["bytes"])
        logger.append_header = state["bytes"] == 0
        logger.keys = state["keys"]


def _copied(value: Any) -> Any:
    """The lists of a history go on growing while it is written down."""
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return list(value) if isinstance(value, list) else value


def _classes(names: Iterable[str]) -> list[type]:
    return [getattr(keras.callbacks, name) for name in names]
