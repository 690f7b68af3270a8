"""Arrays that are sharded over the mesh by rows, with padding."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

Shapes = tuple[tuple[int, ...], ...]


@partial(jax.tree_util.register_dataclass, data_fields=["padded"], meta_fields=["rows", "whole"])
@dataclass(frozen=True)
class PaddedArray:
    """An array sharded over the mesh by its first dim, with its true number of rows.

    Attributes:
        padded: The rows, followed by padding up to a divisible number.
        rows: The number of true rows. Static: part of the compiled program's key.
        whole: Whether the program gets all rows on every device.
    """

    padded: jax.Array
    rows: int
    whole: bool = False


@partial(jax.tree_util.register_dataclass, data_fields=["padded"], meta_fields=["rows"])
@dataclass(frozen=True)
class StackedRows:
    """The predictions of several steps: dim 0 is the step, and dim 1 is sharded.

    NumPy converts it to an array of all true rows, in order, and fetches them only then.

    Attributes:
        padded: The rows, with the padding of each step.
        rows: The number of true rows of each step.
    """

    padded: jax.Array
    rows: int

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return all true rows."""
        steps = np.asarray(self.padded)[:, : self.rows]
        rows = steps.reshape(len(steps) * self.rows, *steps.shape[2:])
        return rows.astype(dtype or rows.dtype, copy=bool(copy))


def laid_out(value: Any, layout: Sharding) -> jax.Array:
    """Return `jax.device_put` of the value; for host arrays in half the time."""
    array: jax.Array
    if isinstance(value, np.ndarray):
        array = jax.make_array_from_callback(value.shape, layout, value.__getitem__)
    else:
        array = jax.device_put(value, layout)
    return array


def longer(batch: Any, rows: int) -> Any:
    """Return a batch with `rows` more rows, as shapes only."""

    def extended(leaf: Any) -> Any:
        if not isinstance(leaf, PaddedArray):
            return leaf
        layout = leaf.padded.sharding
        assert isinstance(layout, NamedSharding)
        shape = list(leaf.padded.shape)
        shape[layout.spec.index("batch")] += rows
        padded: Any = jax.ShapeDtypeStruct(shape, leaf.padded.dtype, sharding=layout)
        return replace(leaf, padded=padded, rows=leaf.rows + rows)

    return jax.tree.map(extended, batch, is_leaf=is_padded)


def is_padded(leaf: Any) -> bool:
    """Return whether the leaf is a `PaddedArray`. Used as `is_leaf` in batches."""
    return isinstance(leaf, PaddedArray)


def shapes_of(batch: Any) -> Shapes:
    """Return the number of rows and the padded shape of each sharded array."""
    leaves = jax.tree.leaves(batch, is_leaf=is_padded)
    return tuple([(leaf.rows, *leaf.padded.shape) for leaf in leaves if is_padded(leaf)])


def undivided(batch: Any) -> Any:
    """Return the same batch, marked so that every device gets all rows."""

    def whole(leaf: Any) -> Any:
        return replace(leaf, whole=True) if is_padded(leaf) else leaf

    return jax.tree.map(whole, batch, is_leaf=is_padded)


def whole_rows(outputs: Any) -> Any:
    """Remove the padding of predictions; only padded ones are fetched."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, PaddedArray):
            return leaf
        if leaf.rows == leaf.padded.shape[0]:
            return leaf.padded
        return np.asarray(leaf.padded)[: leaf.rows]

    return jax.tree.map(
        cut, outputs, is_leaf=lambda leaf: isinstance(leaf, PaddedArray | StackedRows)
    )


def fetched(outputs: Any) -> Any:
    """Fetch the stacked predictions, so that none is fetched later."""

    def rows(leaf: Any) -> Any:
        return np.asarray(leaf) if isinstance(leaf, StackedRows) else leaf

    return jax.tree.map(rows, outputs, is_leaf=lambda leaf: isinstance(leaf, StackedRows))
