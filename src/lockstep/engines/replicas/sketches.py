"""Sketches of what a step computes: four numbers for each entry, and how far two may be apart."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from lockstep.core.devices import shard_rows
from lockstep.keras_compat import computes_in_float64, layers_in

Sketches = dict[str, np.ndarray]
"""What a step has computed, by name: for each entry of the first dim, the numbers of `sketch`."""

OUTPUT, LOG, GRADIENT, STATE = "output", "log", "gradient", "state"

_MOST = 2**22
"""Numbers of one entry that a sketch reads, at most; of more, it reads every second, and so on."""


def sketch(value: Any) -> Any:
    """Return four numbers for each entry of the first dim of a tensor, in float64.

    These are the Euclidean norm of the entry, two weighted sums of it, and the square root of its
    size. Two entries that differ have other sums, in all likelihood.

    Args:
        value: A tensor of the backend, of any shape; it may be symbolic.
    """
    value = keras.ops.stop_gradient(keras.ops.convert_to_tensor(value))
    if "complex" in keras.backend.standardize_dtype(value.dtype):
        value = keras.ops.abs(value)
    entries = keras.ops.shape(value)[0] if len(value.shape) else 1
    return _numbers(keras.ops.cast(keras.ops.reshape(value, (entries, -1)), "float64"), keras.ops)


def sketch_on_host(value: np.ndarray) -> np.ndarray:
    """Return what `sketch` does, of an array: JAX may have no float64."""
    value = np.abs(value) if np.iscomplexobj(value) else value
    entries = len(value) if value.ndim else 1
    numbers: np.ndarray = _numbers(value.reshape(entries, -1).astype("float64"), np)
    return numbers


def _numbers(flat: Any, ops: Any) -> Any:
    """Return the numbers of the entries, a row each, by functions of `keras.ops` or NumPy."""
    size = ops.shape(flat)[1]
    if isinstance(size, int) and size > _MOST:
        flat = flat[:, :: -(-size // _MOST)]
        size = ops.shape(flat)[1]
    places = ops.arange(size, dtype="float64")
    sums = [
        ops.sqrt(ops.sum(flat * flat, axis=1)),
        ops.sum(flat * ops.cos(1.7 * places), axis=1),
        ops.sum(flat * ops.sin(0.9 * places + 0.4), axis=1),
        ops.sum(ops.ones_like(flat), axis=1) ** 0.5,
    ]
    return ops.stack(sums, axis=1)


def has_entries(value: Any) -> bool:
    """Return whether a tensor has a sketch."""
    return all(dim != 0 for dim in value.shape[1:])


def has_rank(value: Any) -> bool:
    """Return whether the number of dims of a tensor is known, as a sketch needs it."""
    try:
        len(value.shape)
    except ValueError:  # of `tf.numpy_function`, say
        return False
    return True


@dataclass(frozen=True)
class Bounds:
    """How far two runs may be apart, relative to the size of what is compared.

    Attributes:
        value: For outputs, logs and states, relative to their norm.
        gradient: For gradients. A kink of ReLU or max pooling moves them more than rounding does.
        of_all: For a gradient, relative to the norm of all gradients.
    """

    value: float
    gradient: float
    of_all: float


_BOUNDS = {
    "float64": Bounds(1e-9, 1e-8, 1e-9),
    "float32": Bounds(1e-4, 1e-3, 1e-4),
    "half": Bounds(5e-2, 2e-1, 5e-2),
}


def bounds_for(model: Any, dtypes: Iterable[str]) -> Bounds:
    """Return the bounds for a step that computes in these types, besides those of the model."""
    found = {keras.config.floatx(), *dtypes, *(layer.compute_dtype for layer in layers_in(model))}
    floats = {name for name in found if name and "float" in name}
    # Keras on PyTorch computes parts of a model of float64 in float32.
    if floats <= {"float64"} and computes_in_float64():
        return _BOUNDS["float64"]
    return _BOUNDS["float32" if floats <= {"float32", "float64"} else "half"]


@dataclass(frozen=True)
class Mismatch:
    """The first thing in which several devices differ from one.

    Attributes:
        kind: `OUTPUT`, `LOG`, `GRADIENT` or `STATE`.
        name: The path of the layer or variable, or the name of the log.
        distance: The largest distance, relative to the size of what was compared.
        layer: The number of the layer in `watched`, of an output.
        is_of_one: Whether two runs of one device differ.
    """

    kind: str
    name: str
    distance: float
    layer: int = -1
    is_of_one: bool = False

    def __str__(self) -> str:
        """Return what differs, and how far."""
        what = {OUTPUT: "the output of", LOG: "the value of", GRADIENT: "the gradient of"}
        return (
            f"{what.get(self.kind, 'the update of')} {self.name!r} differs by {self.distance:.1e}"
        )


def first_mismatch(
    one: Sketches,
    several: list[Sketches],
    rows: int,
    bounds: Bounds,
    near: Sketches | None = None,
) -> Mismatch | None:
    """Return the first thing in which several devices differ from one, `None` if they agree.

    Args:
        one: What one device has computed.
        several: What each replica has computed, of its rows; nothing of those that are not known.
            One of them has everything else.
        rows: The rows of the batch.
        bounds: How far they may be apart.
        near: What one device has computed with inputs that are rounded otherwise: several may
            differ from one a few times as much.
    """
    near = near or {}
    shards = shard_rows(rows, len(several))
    for name in _of(OUTPUT, one):
        for replica, shard in zip(several, shards, strict=True):
            own, moved = replica.get(name), near.get(name)
            found = _distance_of_rows(one[name], own, rows, shard, bounds.value, moved)
            if found > 1:
                number, _, path = _path(name).partition("/")
                return Mismatch(OUTPUT, path, found * bounds.value, int(number))
    first = max(several, key=len)
    for name in _of(LOG, one):
        found = _distance(one[name], first.get(name), 10 * bounds.value, near=near.get(name))
        if found > 1:
            return Mismatch(LOG, _path(name), found * 10 * bounds.value)
    names = _of(GRADIENT, one)
    size = float(np.sqrt(sum(np.nansum(one[name][:, 0] ** 2) for name in names)))
    for name in names:
        more, moved = bounds.of_all * size, near.get(name)
        found = _distance(one[name], first.get(name), bounds.gradient, more, near=moved)
        if found > 1:
            return Mismatch(GRADIENT, _path(name), found * bounds.gradient)
    for name in _of(STATE, one):
        found = _distance(one[name], first.get(name), bounds.value, near=near.get(name))
        if found > 1:
            return Mismatch(STATE, _path(name), found * bounds.value)
    return None


_TIMES = 8
"""How many times as far as inputs that are rounded otherwise other processes may move a result."""


_LARGEST = 1e15


def is_about_to_overflow(one: Sketches) -> bool:
    """Return whether training has exploded: the square of a result may be none in float32."""
    norms = [seen[:, 0] for seen in one.values()]
    return any(not np.all(np.abs(each) < _LARGEST) for each in norms)


def steady(one: Sketches, again: Sketches, bounds: Bounds) -> Sketches:
    """Return sketches without the logs that are not the same twice on one device, but for losses.

    Such a log measures time, say. No weight depends on it unless a gradient differs too.

    Args:
        one: What one device has computed.
        again: What it has computed again.
        bounds: How far they may be apart.
    """
    moved = {
        name
        for name in _of(LOG, one)
        if not name.endswith("loss")
        and _distance(one[name], again.get(name), 10 * bounds.value) > 1
    }
    return {name: value for name, value in one.items() if name not in moved}


def norms_of_gradients(replicas: list[Sketches]) -> dict[str, float]:
    """Return the norm of the gradient of each variable, by its path."""
    seen = max(replicas, key=len)
    return {_path(name): float(seen[name][0, 0]) for name in _of(GRADIENT, seen)}


def _of(kind: str, seen: Sketches) -> list[str]:
    return [name for name in seen if name.startswith(f"{kind}/")]


def _path(name: str) -> str:
    return name.split("/", 2)[2]


def _distance_of_rows(
    one: np.ndarray,
    own: np.ndarray | None,
    rows: int,
    shard: range,
    bound: float,
    near: np.ndarray | None,
) -> float:
    """Return the distance of what one replica has computed, in units of the bound."""
    if own is None:  # it is within a layer that all devices share
        return 0.0
    size = max(len(shard), 1)
    if len(one) % rows == 0 and len(own) == len(one) // rows * size:
        each = len(one) // rows
        if not len(shard):  # it has run another row, and nobody uses it
            return 0.0
        part = slice(shard.start * each, shard.stop * each)
        moved = near[part] if near is not None and near.shape == one.shape else None
        return _distance(one[part], own, bound, 0.0, one, moved)
    if len(one) == len(own):
        return _distance(one, own, bound, near=near)
    return 0.0  # it has no rows, and other layers show whether it matters


def _distance(
    one: np.ndarray,
    own: np.ndarray | None,
    bound: float,
    more: float = 0.0,
    whole: np.ndarray | None = None,
    near: np.ndarray | None = None,
) -> float:
    """Return the largest difference in units of what is allowed; NaN equals NaN."""
    if own is None or one.shape != own.shape:
        return np.inf
    norms = np.nan_to_num((one if whole is None else whole)[:, 0])
    typical = float(np.sqrt(np.mean(norms**2))) if len(norms) else 0.0
    size = np.maximum(np.nan_to_num(one[:, 0]), typical)
    allowed = bound * size + more + 0.01 * bound * one[:, 3]
    apart = np.max(np.abs(one - own)[:, :3], axis=1, initial=0.0)
    same = np.all((one == own) | (np.isnan(one) & np.isnan(own)), axis=1)
    if near is not None and near.shape == one.shape:
        moved = np.max(np.abs(near - one)[:, :3], axis=1, initial=0.0)
        both = np.isnan(near).any(axis=1) & np.isnan(one).any(axis=1)
        same |= np.isnan(moved) & ~both  # rounding alone makes it a number or none
        allowed = allowed + _TIMES * np.nan_to_num(moved)
    units = np.where(same, 0.0, apart / np.maximum(allowed, 1e-300))
    return float(np.max(np.where(np.isnan(units), np.inf, units), initial=0.0))
