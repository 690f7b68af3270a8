"""An array split over the mesh by rows."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding


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

    return jax.tree.map(extended, batch, is_leaf=lambda leaf: isinstance(leaf, Sharded))
