"""Build Keras models with shapes, paths and a config, but without weights.

A large model is built without allocating its weights. While Keras saves the model, each
variable reads its value from the old file.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_GLOBAL_NAMES = ("uninitialized_variables", "object_name_uids")


@contextmanager
def isolated() -> Iterator[None]:
    """Restore Keras's global state after the body has built models.

    Keras keeps a list of variables without values. It allocates all of them when it next
    leaves a stateless scope, which can take gigabytes long after the rescue. Keras also
    counts the names that it gives to layers.
    """
    from lockstep.keras_compat import global_state as state

    before = {name: state.get_global_attribute(name) for name in _GLOBAL_NAMES}
    for name, value in before.items():
        state.set_global_attribute(name, value.copy() if value is not None else None)
    try:
        yield
    finally:
        for name, value in before.items():
            state.set_global_attribute(name, value)


@contextmanager
def weightless() -> Iterator[None]:
    """Build variables without values in the body."""
    with _scope(lambda variable: None):
        yield


def layout(model: Any) -> dict[str, int]:
    """Return where Keras saves each variable of a model: `{path in the file: index}`.

    Keras saves the model with every variable replaced by its index, and the file is read
    back. The layout is therefore Keras's own, in every version.

    Args:
        model: Any built model, with or without values.

    Returns:
        Paths of arrays inside a `.weights.h5`, and positions in `model.variables`;
        -1 for a variable that is in the file but not in `model.variables`.
    """
    import h5py
    import numpy as np

    positions = {id(variable): index for index, variable in enumerate(model.variables)}
    found: dict[str, int] = {}

    def visit(name: str, thing: Any) -> None:
        if isinstance(thing, h5py.Dataset):
            found[name] = int(thing[()])

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "layout.weights.h5")
        save_weights(model, path, lambda variable: np.int64(positions.get(id(variable), -1)))
        with h5py.File(path, "r") as handle:
            handle.visititems(visit)
    return found


def save_weights(model: Any, path: str, value: Callable[[Any], Any]) -> None:
    """Let Keras write a `.weights.h5` with values from elsewhere.

    Args:
        model: The model; its own values do not change.
        path: The file to write.
        value: The array for a variable, or None for the variable's own value.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        model.optimizer = None  # Keras creates variables while it saves an optimizer
    try:
        with quiet(), _scope(value):
            model.save_weights(path)
    finally:
        if optimizer is not None:
            model.optimizer = optimizer


@contextmanager
def quiet() -> Iterator[None]:
    """Hide a warning of NumPy 2 about how Keras 3.15 converts variables."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        yield


def numbers(variable: Any) -> Any:
    """Return the value of a variable as a NumPy array, or its initial value if it has none."""
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
