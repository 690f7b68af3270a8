"""The methods of a model that several processes train."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from lockstep.core.fit_arguments import names_by_place
from lockstep.keras_compat import io_utils
from lockstep.keras_compat.foreign_patches import replaced
from lockstep.processes.call_scope import CALLS
from lockstep.processes.coordination import report_done, wait_for_first_process
from lockstep.processes.group import current
from lockstep.processes.process_group import (
    check_orbax,
    check_reads,
    is_first,
    share_random_numbers,
    wait_for_all,
)
from lockstep.processes.variable_drift import VariableDrift


def methods_of_all_processes(
    model: Any,
    hooks: dict[str, Callable[..., Any]],
    assigned: VariableDrift,
    shards: Any = None,
) -> dict[str, Callable[..., Any]]:
    """Return the methods of a model that several processes train: `hooks`, and more.

    Only the first process prints and writes files. `fit` returns when all processes have finished.

    Args:
        model: The model.
        hooks: Its methods by name.
        assigned: The values that this process assigns to variables.
        shards: What the first process reads with the help of all; `None` if it has all variables.
    """
    methods = {name: hooks.get(name, getattr(model, name)) for name in (*_PRINTING, *_ON_BATCH)}
    places = {name: names_by_place(getattr(model, name)) for name in methods}
    for name in _PRINTING:
        if not is_first():
            methods[name] = _quiet(methods[name], places[name])
        if getattr(type(model), name) is not getattr(keras.Model, name):
            methods[name] = _with_loops_of_all(methods[name])
    methods = {
        name: _of_all(name, each, places[name], assigned, shards is not None)
        for name, each in methods.items()
    }
    for name in _WRITING:
        if hasattr(model, name):
            save = hooks.get(name, getattr(model, name))
            if shards is None:
                methods[name] = _reporting_its_end(save) if is_first() else _written_by_first
            elif name != "export":  # which raises in every process
                methods[name] = _read_from_all(save, shards)
    return {**hooks, **methods}


_PRINTING = ("fit", "evaluate", "predict")
_ON_BATCH = ("train_on_batch", "test_on_batch", "predict_on_batch")
_WRITING = ("save", "save_weights", "export")


def _of_all(
    name: str,
    method: Callable[..., Any],
    places: list[str],
    assigned: VariableDrift,
    has_parts: bool,
) -> Callable[..., Any]:
    """Wrap a method that all processes call, on the same values of variables."""

    @functools.wraps(method)
    def method_of_all(*args: Any, **kwargs: Any) -> Any:
        if has_parts:
            check_reads(_by_name(places, args, kwargs).get("callbacks"))
        with CALLS.call(name) as outermost:
            for value in keras.tree.flatten((args, kwargs)):
                current().local(value)  # raises for an array that no process has whole
            if outermost and name in _PRINTING:
                assigned.share()
            if name == "fit":
                share_random_numbers()
            result = method(*args, **kwargs)
            if name == "fit":
                if outermost:
                    CALLS.end()
                wait_for_all()
            return result

    return method_of_all


def _quiet(method: Callable[..., Any], places: list[str]) -> Callable[..., Any]:
    """Wrap a method so that it prints nothing, and drop the callbacks that write."""
    parameters = inspect.signature(method).parameters
    any_name = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    @functools.wraps(method)
    def quiet_method(*args: Any, **kwargs: Any) -> Any:
        given = _by_name(places, args, kwargs)
        quiet = {"verbose": 0}
        if "callbacks" in given:
            quiet["callbacks"] = _that_do_not_write(given["callbacks"])
        values = [*args]
        for argument, value in quiet.items():
            if argument in places[: len(args)]:  # replaced as it was given, by position or by name
                values[places.index(argument)] = value
            elif argument in parameters or any_name:
                kwargs[argument] = value
        with _without_words():
            return method(*values, **kwargs)

    return quiet_method


@contextmanager
def _without_words() -> Iterator[None]:
    """Silence Keras in this context, including callbacks with `verbose=1`."""
    # keras/src/utils/io_utils.py, print_msg: all of keras/src/callbacks/*.py print with it.
    with replaced([(io_utils, "print_msg", lambda *_, **__: None)]):
        yield


def _with_loops_of_all(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an overridden method, which may pass `verbose` and callbacks to Keras's method."""

    @functools.wraps(method)
    def own_method(*args: Any, **kwargs: Any) -> Any:
        with _loops_of_all():
            return method(*args, **kwargs)

    return own_method


@contextmanager
def _loops_of_all() -> Iterator[None]:
    """Restrict Keras's loops in this context to callbacks that work in several processes.

    In every process but the first, the loops print nothing and drop callbacks that write.
    """
    # keras/src/callbacks/callback_list.py, CallbackList.__init__: every loop makes its list here.
    begin = keras.callbacks.CallbackList.__init__

    @functools.wraps(begin)
    def begin_as_one_of_all(
        self: Any,
        callbacks: Any = None,
        add_history: bool = False,
        add_progbar: bool = False,
        **kwargs: Any,
    ) -> None:
        check_orbax(callbacks)
        if not is_first():
            callbacks, add_progbar = _that_do_not_write(callbacks), False
        begin(self, callbacks, add_history, add_progbar, **kwargs)

    with replaced([(keras.callbacks.CallbackList, "__init__", begin_as_one_of_all)]):
        yield


def _by_name(places: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(places, args, strict=False)), **kwargs}


def _reporting_its_end(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a saving method so that it reports its end to the other processes of the call."""

    @functools.wraps(save)
    def save_and_report(*args: Any, **kwargs: Any) -> Any:
        name = CALLS.new_file(_path_of(*args, **kwargs))
        try:
            return save(*args, **kwargs)
        finally:
            if name is not None:
                report_done(name)

    return save_and_report


def _written_by_first(*args: Any, **kwargs: Any) -> None:
    """Replace a saving method in every process but the first: wait until the file is written."""
    name = CALLS.new_file(_path_of(*args, **kwargs))
    if name is not None:
        wait_for_first_process(name, CALLS.passed())


def _read_from_all(save: Callable[..., Any], shards: Any) -> Callable[..., Any]:
    """Wrap a saving method so that every process takes part in what the first one reads."""

    @functools.wraps(save)
    def save_with_all(*args: Any, **kwargs: Any) -> Any:
        if not is_first():
            return shards.follow()
        with shards.read_with_all():
            return save(*args, **kwargs)

    return save_with_all


def _path_of(filepath: Any = None, *_: Any, **__: Any) -> Any:
    return filepath


def _that_do_not_write(callbacks: Any) -> Any:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks[:] = _that_do_not_write(callbacks.callbacks)
        return callbacks
    if callbacks is None:
        return None
    return [
        _RestoreOnly(callback)
        if isinstance(callback, keras.callbacks.BackupAndRestore)
        else callback
        for callback in keras.tree.flatten(callbacks)
        if not isinstance(callback, _WRITERS) and not _is_of_a_logger(callback)
    ]


def _is_of_a_logger(callback: Any) -> bool:
    """Return whether a package of `LOGGERS` has made the class of a callback, or a base of it."""
    return any(kind.__module__.partition(".")[0] in LOGGERS for kind in type(callback).__mro__)


_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)
LOGGERS = {
    *("wandb", "mlflow", "comet_ml", "clearml", "aim", "swanlab"),
    *("neptune", "neptune_tensorflow_keras"),
}
"""Packages whose callbacks write to a run that each process would open."""


class _RestoreOnly(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """`BackupAndRestore` without the backup."""

    def __init__(self, backup: Any) -> None:
        super().__init__()
        self._backup = backup

    def on_train_begin(self, logs: Any = None) -> None:
        self._backup.set_model(self.model)
        self._backup.on_train_begin(logs)
