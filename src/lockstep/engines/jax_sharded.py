"""An array split over the mesh by rows."""

from dataclasses import dataclass
from functools import partial

import jax


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
