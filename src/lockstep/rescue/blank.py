"""Keras models whose weights are not there.

A model built here has the shapes, paths and config of a real one and allocates no
weight, so that gigabytes can be streamed past it from one file to another.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class _Apart(threading.Thread):
    unwanted = False


def require_wanted() -> None:
    """End the work of this thread where its caller was interrupted."""
    if getattr(threading.current_thread(), "unwanted", False):
        raise KeyboardInterrupt


def apart(work: Callable[[], T]) -> T:
    """Do Keras work in a thread of its own, and leave no trace in the caller's Keras.

    Keras keeps per thread a list of variables that have no values yet, and gives values to
    all of them whenever it next finishes a model. In the caller's thread that would be
    gigabytes, long after the rescue; a thread takes its list along when it ends. Names
    that Keras numbers are not used up either.

    An interrupt (Ctrl-C) ends the work at its next `require_wanted`, and is raised when it
    has ended: nothing goes on, or appears, behind the caller's back.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)
        finally:
            ended.set()

    # Not join: in Python 3.11, one that was interrupted takes its thread for ended.
    ended = threading.Event()
    thread = _Apart(target=run, name="lockstep-rescue", daemon=True)
    thread.start()
    try:
        ended.wait()
    except BaseException:
        thread.unwanted = True
        ended.wait()
        raise
    finally:
        thread.join()
    if failed:
        raise failed[0]
    return done[0]


@contextmanager
def weightless() -> Iterator[None]:
    """Whatever is built inside gets variables without values."""
    with _scope(lambda variable: None):
        yield


def layout(model: Any, folder: str) -> dict[str, int]:
    """Where Keras itself writes each variable of a model: `{path in file: index}`.

    Keras saves the model with every variable replaced by its number, and the file
    is read back: so the layout is Keras's own, whatever its version.

    Args:
        model: Any built model, with or without values.
        folder: A folder for the small temporary file.

    Returns:
        Paths of arrays inside a `.weights.h5`, and positions in `model.variables`;
        -1 for a variable that is in the file and not in `model.variables`.
    """
    import h5py
    import numpy as np

    positions = {id(variable): index for index, variable in enumerate(model.variables)}
    path = os.path.join(folder, "layout.weights.h5")
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        model.optimizer = None  # Keras makes variables while it saves one
    try:
        marks = _scope(lambda variable: np.asarray(positions.get(id(variable), -1), dtype="int64"))
        with quiet(), marks:
            model.save_weights(path)
    finally:
        if optimizer is not None:
            model.optimizer = optimizer
    found: dict[str, int] = {}

    def visit(name: str, thing: Any) -> None:
        if isinstance(thing, h5py.Dataset):
            found[name] = int(thing[()])

    with h5py.File(path, "r") as handle:
        handle.visititems(visit)
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Keras 3.15 converts variables in a way that NumPy 2 is about to drop: not the user's care."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        yield


def numbers(variable: Any) -> Any:
    """A variable's value as a NumPy array; its initial one where it has none."""
    import keras
    import numpy as np

    return np.asarray(keras.ops.convert_to_numpy(variable.value))


def _scope(value: Callable[[Any], Any]) -> Any:
    import keras

    class Scope(keras.StatelessScope):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(initialize_variables=False)

        def get_current_value(self, variable: Any) -> Any:
            return value(variable)

    return Scope()
