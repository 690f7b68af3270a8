"""The variables of a model as host arrays."""

from pathlib import Path
from typing import Any

import numpy as np

Values = dict[str, np.ndarray]
"""Arrays by name."""


def _variables(model: Any) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for prefix, group in (("", model.variables), ("optimizer/", model.optimizer.variables)):
        for variable in group:
            name = prefix + variable.path
            while name in named:  # paths are not always unique
                name += "'"
            named[name] = variable
    return named


def values_of(model: Any) -> Values:
    """Every weight, seed and optimizer slot of a model, as host arrays."""
    return {name: _on_host(variable.value) for name, variable in _variables(model).items()}


def _on_host(value: Any) -> np.ndarray:
    array = np.array(value)
    # What NumPy has no name for, such as bfloat16, float32 holds without loss.
    return array if array.dtype.kind in "fiub" else array.astype("float32")


def assign(model: Any, values: Values) -> None:
    """Set what `values_of` read."""
    for name, variable in _variables(model).items():
        variable.assign(values[name])


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest absolute difference; NaN and infinity equal themselves."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        return float("inf")
    if a.dtype.kind in "iub":
        return 0.0 if np.array_equal(a, b) else float("inf")
    a, b = a.astype("float64"), b.astype("float64")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.max(np.where(same, 0.0, np.abs(a - b)), initial=0.0))


def moved_by_last_bit(value: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Every float moved up or down by its last bit, at random."""
    if value.dtype.kind != "f":
        return value
    up = np.where(random.random(value.shape) < 0.5, np.inf, -np.inf).astype(value.dtype)
    moved: np.ndarray = np.nextafter(value, up)
    return moved


def write(file: Path, values: Values) -> None:
    """Keep values in a file."""
    arrays: dict[str, Any] = {f"a{n}": value for n, value in enumerate(values.values())}
    np.savez(file, names=np.array(list(values)), **arrays)


def read(file: Path) -> Values:
    """What `write` kept."""
    with np.load(file) as arrays:
        return {str(name): arrays[f"a{n}"] for n, name in enumerate(arrays["names"])}
