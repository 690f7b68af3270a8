"""An array split over the mesh by rows."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

Shapes = tuple[tuple[int, ...], ...]


@partial(jax.tree_util.register_dataclass, data_fields=["padded"], meta_fields=["rows", "whole"])
@dataclass(frozen=True)
class Sharded:
    """An array split over the mesh by its first dim, with its true number of rows.

    Attributes:
        padded: Its rows, and after them as many as make the number divisible.
        rows: How many of them are true. Static: part of the compiled program's key.
        whole: Whether a program that takes it is to have all of its rows on every device.
    """

    padded: jax.Array
    rows: int
    whole: bool = False


@partial(jax.tree_util.register_dataclass, data_fields=["padded"], meta_fields=["rows"])
@dataclass(frozen=True)
class StackedRows:
    """The predictions of several steps: the step is the first dim, and the second is split.

    NumPy takes it for an array of all true rows, in their order, and fetches them only then.

    Attributes:
        padded: Their rows, each step's with its padding.
        rows: How many of each step are true.
    """

    padded: jax.Array
    rows: int

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The rows."""
        steps = np.asarray(self.padded)[:, : self.rows]
        rows = steps.reshape(len(steps) * self.rows, *steps.shape[2:])
        return rows.astype(dtype or rows.dtype, copy=bool(copy))


def laid_out(value: Any, layout: NamedSharding) -> jax.Array:
    """What `jax.device_put` makes of it; of an array of the host in half the time."""
    array: jax.Array
    if isinstance(value, np.ndarray):
        array = jax.make_array_from_callback(value.shape, layout, value.__getitem__)
    else:
        array = jax.device_put(value, layout)
    return array


def longer(batch: Any, rows: int) -> Any:
    """A batch like this one with so many rows more, as shapes alone."""

    def extended(leaf: Any) -> Any:
        if not isinstance(leaf, Sharded):
            return leaf
        layout = leaf.padded.sharding
        assert isinstance(layout, NamedSharding)
        shape = list(leaf.padded.shape)
        shape[layout.spec.index("batch")] += rows
        padded: Any = jax.ShapeDtypeStruct(shape, leaf.padded.dtype, sharding=layout)
        return replace(leaf, padded=padded, rows=leaf.rows + rows)

    return jax.tree.map(extended, batch, is_leaf=is_sharded)


def is_sharded(leaf: Any) -> bool:
    """Whether this is a `Sharded`, at which a walk through a batch ends."""
    return isinstance(leaf, Sharded)


def shapes_of(batch: Any) -> Shapes:
    """Of the arrays that are split: the number of rows, and the shape with the padding."""
    leaves = jax.tree.leaves(batch, is_leaf=is_sharded)
    return tuple([(leaf.rows, *leaf.padded.shape) for leaf in leaves if is_sharded(leaf)])


def undivided(batch: Any) -> Any:
    """The same batch, of which every device takes all rows."""

    def whole(leaf: Any) -> Any:
        return replace(leaf, whole=True) if is_sharded(leaf) else leaf

    return jax.tree.map(whole, batch, is_leaf=is_sharded)


def whole_rows(outputs: Any) -> Any:
    """Predictions without the padding; only ragged ones are fetched for it."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Sharded):
            return leaf
        if leaf.rows == leaf.padded.shape[0]:
            return leaf.padded
        return np.asarray(leaf.padded)[: leaf.rows]

    return jax.tree.map(cut, outputs, is_leaf=lambda leaf: isinstance(leaf, Sharded | StackedRows))


def fetched(outputs: Any) -> Any:
    """Predictions of which none waits any longer to be fetched."""

    def rows(leaf: Any) -> Any:
        return np.asarray(leaf) if isinstance(leaf, StackedRows) else leaf

    return jax.tree.map(rows, outputs, is_leaf=lambda leaf: isinstance(leaf, StackedRows))
