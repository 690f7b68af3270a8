"""Save and restore callbacks: Keras's own, and any with `get_state` and `set_state`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import keras

from lockstep.errors import CheckpointError
from lockstep.keras_compat import STATE_OF_CALLBACKS, set_monitor_op

_WITHOUT_STATE = (
    "LambdaCallback",
    "LearningRateScheduler",
    "ProgbarLogger",
    "RemoteMonitor",
    "TerminateOnNaN",
)


_NAMED_BY = ("monitor", "mode", "filepath", "filename")
"""The attributes that distinguish two Keras callbacks of one class."""


def states_of(callbacks: list[Any]) -> list[dict[str, Any]]:
    """Return the state of each callback, its class name and its distinguishing arguments."""
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
    """Restore the result of `states_of` to callbacks of the same class and arguments.

    Returns:
        Remarks for the user on callbacks that were not fully restored.
    """
    callbacks = [each for each in callbacks if not _is_without_state(each)]
    written, left = _matched(callbacks, states)
    words = []
    for callback, state in zip(callbacks, written, strict=True):
        if state is None:
            name = _said(type(callback).__name__, _which(callback))
            words.append(f"{name} is not in the checkpoint, and starts from its initial state")
        else:
            words += _put(callback, state)
    return words + [
        f"{_said(each['class'], each.get('which', {}))} is in the checkpoint, but not in this fit"
        for each in left
    ]


def _matched(callbacks: list[Any], states: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Return the state of each callback, or `None`, and the states without a callback."""
    found: list[Any] = [None] * len(callbacks)
    left = list(states)
    for aside in ((), ("filepath",)):  # the path of the best model may have changed
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
        _put_keras_state(callback, written.get("keras"))
        callback.set_state(written["state"])
        return []
    if written["state"] is None:
        return [f"{name} has no get_state and set_state, and starts from its initial state"]
    _put_keras_state(callback, written["state"])
    if not _has_hooks_of_its_own(callback):
        return []
    return [
        (
            f"{name} has no get_state and set_state, so only the state of its Keras base class is "
            "restored"
        )
    ]


def _which(callback: Any) -> dict[str, str]:
    if not isinstance(callback, tuple(_classes(STATE_OF_CALLBACKS))):
        return {}
    named = {name: getattr(callback, name, None) for name in _NAMED_BY}
    return {name: value for name, value in named.items() if isinstance(value, str)}


def _said(name: str, which: dict[str, str]) -> str:
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in which.items())})" if which else name


def _has_hooks_of_its_own(callback: Any) -> bool:
    """Whether a subclass of Keras's callbacks overrides a hook, and so may have its own state."""
    own = [base for base in type(callback).__mro__ if not base.__module__.startswith("keras.")]
    return any(name.startswith("on_") for base in own for name in vars(base))


def less_is_better(model: Any, monitor: str, mode: str) -> bool:
    """Whether smaller monitored values are better, by the rule of Keras's callbacks.

    Raises:
        CheckpointError: If `mode` is `"auto"` and the metrics do not define a direction.
    """
    if mode != "auto":
        return mode == "min"
    asked = keras.callbacks.EarlyStopping(monitor)
    asked.set_model(model)
    try:
        set_monitor_op(asked)
    except ValueError:
        raise CheckpointError(
            f'lockstep.Checkpoint(monitor={monitor!r}) has mode="auto", but no metric of the '
            "model tells\n"
            'whether a lower or a higher value is better. Set mode="min" or mode="max".'
        ) from None
    return bool(asked.monitor_op is keras.ops.less)


@contextmanager
def appending(callbacks: list[Any]) -> Iterator[None]:
    """Context manager in which every `CSVLogger` appends to its file."""
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
    """Return the attributes that the callback's Keras class changes; `None` for other classes."""
    names = [
        name
        for base in type(callback).__mro__
        for name in STATE_OF_CALLBACKS.get(base.__name__, ())
    ]
    if not names or not isinstance(callback, tuple(_classes(STATE_OF_CALLBACKS))):
        return None
    return {name: _copied(getattr(callback, name)) for name in names if hasattr(callback, name)}


def _put_keras_state(callback: Any, state: dict[str, Any] | None) -> None:
    for name, value in (state or {}).items():
        setattr(callback, name, value)
    # keras/src/callbacks/model_checkpoint.py: monitor_op is set at the end of an epoch, but a
    # batch needs it as soon as there is a best value.
    if state and state.get("best") is not None and callback.monitor_op is None:
        with suppress(ValueError):  # mode="auto" without a direction; Keras raises it later
            set_monitor_op(callback)


def _copied(value: Any) -> Any:
    """Copy dicts and lists, because a history grows while it is being written."""
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return list(value) if isinstance(value, list) else value


def _classes(names: Iterable[str]) -> list[type]:
    return [getattr(keras.callbacks, name) for name in names]
