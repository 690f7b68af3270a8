"""The states of callbacks: of Keras's own, and of any that has `get_state` and `set_state`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import keras

from lockstep.engines import log_states
from lockstep.errors import CheckpointError

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
    # Whether the weights and their averages have changed places, as they have between two epochs.
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_train_batch", "_global_test_batch", "_previous_epoch_iterations"),
    "History": ("history", "epoch"),
}
_WITHOUT_STATE = (
    "LambdaCallback",
    "LearningRateScheduler",
    "ProgbarLogger",
    "RemoteMonitor",
    "TerminateOnNaN",
)


_NAMED_BY = ("monitor", "mode", "filepath", "filename")
"""What tells two of Keras's callbacks of one class apart."""


def states_of(callbacks: list[Any]) -> list[dict[str, Any]]:
    """The state of each callback, beside the name of its class and what it was made with."""
    return [
        {
            "class": type(each).__name__,
            "which": _which(each),
            "state": each.get_state() if _keeps_own(each) else _keras_state(each),
            "keras": _keras_state(each) if _keeps_own(each) else None,
        }
        for each in callbacks
        if not _is_without_state(each)
    ]


def put_states(callbacks: list[Any], states: list[dict[str, Any]]) -> list[str]:
    """Set what `states_of` gave, to a callback of the same class that is made alike.

    Returns:
        What a user has to know, in words.
    """
    callbacks = [each for each in callbacks if not _is_without_state(each)]
    written, left = _matched(callbacks, states)
    words = []
    for callback, state in zip(callbacks, written, strict=True):
        if state is None:
            name = _said(type(callback).__name__, _which(callback))
            words.append(f"{name} is new, and begins anew")
        else:
            words += _put(callback, state)
    return words + [f"{_said(each['class'], each.get('which', {}))} is gone" for each in left]


def _matched(callbacks: list[Any], states: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """The state of each callback, `None` where there is none, and the states that are left."""
    found: list[Any] = [None] * len(callbacks)
    left = list(states)
    for aside in ((), ("filepath",)):  # a run may write its best model into another folder now
        for number, callback in enumerate(callbacks):
            alike = (each for each in left if _is_of(callback, each, aside))
            if found[number] is None and (state := next(alike, None)) is not None:
                found[number] = state
                left[:] = [each for each in left if each is not state]
    return found, left


def _is_of(callback: Any, state: dict[str, Any], aside: tuple[str, ...]) -> bool:
    here = _which(callback)
    there = state.get("which", here)
    same = all(here.get(name) == there.get(name) for name in _NAMED_BY if name not in aside)
    return same and state["class"] == type(callback).__name__


def _put(callback: Any, written: dict[str, Any]) -> list[str]:
    name = type(callback).__name__
    if _keeps_own(callback):
        words = _put_keras_state(callback, written.get("keras"))
        callback.set_state(written["state"])
        return words
    if written["state"] is None:
        return [f"{name} has no get_state and set_state, and begins anew"]
    more = _more_than_keras(callback)
    words = [f"{name} has no get_state and set_state, and begins anew with its {more}"]
    return _put_keras_state(callback, written["state"]) + (words if more else [])


def _which(callback: Any) -> dict[str, str]:
    if not isinstance(callback, (*_classes(_CHANGED), keras.callbacks.CSVLogger)):
        return {}
    named = {name: getattr(callback, name, None) for name in _NAMED_BY}
    return {name: value for name, value in named.items() if isinstance(value, str)}


def _said(name: str, which: dict[str, str]) -> str:
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in which.items())})" if which else name


def _more_than_keras(callback: Any) -> str:
    """The attributes that a subclass has beside those that the code of Keras's class names."""
    keras_own = [base for base in type(callback).__mro__ if base.__module__.startswith("keras.")]
    code = [getattr(each, "__code__", None) for base in keras_own for each in vars(base).values()]
    known = {name for each in code if each is not None for name in each.co_names}
    return ", ".join(name for name in vars(callback) if name not in known)


def less_is_better(model: Any, monitor: str, mode: str) -> bool:
    """Whether a smaller value of what is monitored is better, as Keras's callbacks have it.

    Raises:
        CheckpointError: If the metrics of the model do not say.
    """
    if mode != "auto":
        return mode == "min"
    # keras/src/callbacks/monitor_callback.py, MonitorCallback._set_monitor_op
    asked = keras.callbacks.EarlyStopping(monitor)
    asked.set_model(model)
    try:
        asked._set_monitor_op()
    except ValueError:
        raise CheckpointError(
            f'lockstep.Checkpoint(monitor={monitor!r}) was given with mode="auto", and none of the '
            "metrics of the model\nsays whether less or more of it is better. Say "
            'mode="min" or mode="max".'
        ) from None
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


def _keras_state(callback: Any) -> Any:
    """What Keras's class of this callback changes; `None` where it is of none."""
    if isinstance(callback, keras.callbacks.CSVLogger):
        return log_states.log_of(callback)
    names = [name for base in type(callback).__mro__ for name in _CHANGED.get(base.__name__, ())]
    if not names or not isinstance(callback, tuple(_classes(_CHANGED))):
        return None
    return {name: _copied(getattr(callback, name)) for name in names if hasattr(callback, name)}


def _put_keras_state(callback: Any, state: dict[str, Any] | None) -> list[str]:
    if state is None:
        return []
    if isinstance(callback, keras.callbacks.CSVLogger):
        return log_states.cut_log(callback, state)
    for name, value in state.items():
        setattr(callback, name, value)
    # keras/src/callbacks/model_checkpoint.py: made at the end of an epoch only, and needed at a
    # batch as soon as there is a best value.
    if state.get("best") is not None and callback.monitor_op is None:
        with suppress(ValueError):  # of "auto", which is said in its turn
            callback._set_monitor_op()
    return []


def _copied(value: Any) -> Any:
    """The lists of a history go on growing while it is written down."""
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return list(value) if isinstance(value, list) else value


def _classes(names: Iterable[str]) -> list[type]:
    return [getattr(keras.callbacks, name) for name in names]
