"""The variables of a model as host arrays."""

from pathlib import Path
from typing import Any

import keras
import numpy as np

Values = dict[str, np.ndarray]
"""Arrays by name."""


def _variables(model: Any) -> dict[str, Any]:
    named: dict[str, Any] = {}
    own = [*model.variables, *states_of_rnns(model)]
    own = list({id(variable): variable for variable in own}.values())
    for prefix, group in (("", own), ("optimizer/", model.optimizer.variables)):
        for variable in group:
            name = prefix + variable.path
            while name in named:  # paths are not always unique
                name += "'"
            named[name] = variable
    return named


def states_of_rnns(model: Any) -> list[Any]:
    """What stateful RNNs keep from batch to batch, which is in no list of variables."""
    layers = getattr(model, "layers", [])
    found = [state for layer in layers for state in states_of_rnns(layer)]
    inner = [getattr(model, name, None) for name in ("forward_layer", "backward_layer")]
    found += [state for layer in inner if layer is not None for state in states_of_rnns(layer)]
    states = getattr(model, "states", None) if getattr(model, "stateful", False) else None
    return found + [state for state in keras.tree.flatten(states) if state is not None]


def values_of(model: Any) -> Values:
    """Every weight, seed, state of an RNN and optimizer slot of a model, as host arrays."""
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


def moved_by_last_bit(
    value: np.ndarray, random: np.random.Generator, bits: int | None = None
) -> np.ndarray:
    """Every float moved up or down, at random, by the last bit that counts.

    Args:
        value: Any array; what is not of floats comes back as it is.
        random: Draws the directions.
        bits: The bits of the significand in which the model computes, the implicit one
            included; `None` for those of `value`.
    """
    if value.dtype.kind != "f":
        return value
    own = np.finfo(value.dtype).nmant + 1
    step = np.spacing(np.abs(value)) * 2.0 ** (own - min(bits or own, own))
    moved: np.ndarray = np.where(random.random(value.shape) < 0.5, value + step, value - step)
    return moved.astype(value.dtype)


def significand_bits(model: Any) -> int:
    """The bits of the significand in the coarsest type a layer computes in: 24 for float32."""
    bits = [_SIGNIFICAND_BITS.get(str(model.compute_dtype), 53)]
    return min(bits + [significand_bits(layer) for layer in getattr(model, "layers", [])])


_SIGNIFICAND_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}


def write(file: Path, values: Values) -> None:
    """Keep values in a file."""
    arrays: dict[str, Any] = {f"a{n}": value for n, value in enumerate(values.values())}
    np.savez(file, names=np.array(list(values)), **arrays)


def read(file: Path) -> Values:
    """What `write` kept."""
    with np.load(file) as arrays:
        return {str(name): arrays[f"a{n}"] for n, name in enumerate(arrays["names"])}
