"""How the rows of a batch are cut into parts over the devices, and put together again."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.engines.jax.parts.row_draws import PartRows


@dataclass(frozen=True)
class RowParts:
    """How the rows of a batch are cut into parts.

    Where all parts have as many rows, part j has the j-th block of each device, and no row moves.
    Otherwise parts are consecutive rows, and the last one has those that remain.

    Attributes:
        rows: The rows of the batch.
        devices: The devices over which they are split.
        each: The rows of a device in a part.
        layout: The layout of arrays by rows.
    """

    rows: int
    devices: int
    each: int
    layout: NamedSharding

    @property
    def size(self) -> int:
        """The rows of a part."""
        return self.devices * self.each

    @property
    def full(self) -> int:
        """The number of parts with `size` rows."""
        return self.rows // self.size

    @property
    def rest(self) -> int:
        """The rows of the last part; 0 if all parts have as many."""
        return self.rows % self.size

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows of the programs: of the batch, of a part, of the last part."""
        sizes = {self.rows, self.size, self.rest or self.size}
        return tuple(sorted(sizes, reverse=True))

    def of_part(self) -> PartRows:
        """Return the rows of a part, for its draws."""
        if self.rest:
            return PartRows(self.size, self.rows, self.size, self.size)
        return PartRows(self.size, self.rows, self.each, self.full * self.each)

    def of_rest(self) -> PartRows:
        """Return the rows of the last part, for its draws."""
        return PartRows(self.rest, self.rows, self.rest, self.rest)

    def firsts(self) -> Any:
        """Return the number of the first row of each full part."""
        step = self.size if self.rest else self.each
        return jnp.arange(self.full, dtype="uint32") * jnp.uint32(step)

    def cut(self, array: Any) -> Any:
        """Return the rows of the full parts; the part is the first dim."""
        array = array[: self.full * self.size]
        if self.rest or self.devices == 1:
            return self.laid_out(array.reshape(self.full, self.size, *array.shape[1:]), 1)
        blocks = array.reshape(self.devices, self.full, self.each, *array.shape[1:])
        parts = self.laid_out(jnp.swapaxes(self.laid_out(blocks, 0), 0, 1), 1)
        return self.laid_out(parts.reshape(self.full, self.size, *array.shape[1:]), 1)

    def joined(self, parts: Any, rest: Any) -> Any:
        """Return all rows of an array, in order, from those of `cut` and of the last part."""
        each, others = parts.shape[1] // self.devices, parts.shape[2:]
        if not self.rest and self.devices > 1:
            blocks = parts.reshape(self.full, self.devices, each, *others)
            parts = self.laid_out(jnp.swapaxes(self.laid_out(blocks, 1), 0, 1), 0)
        joined = parts.reshape(self.full * self.devices * each, *others)
        if self.rest:
            joined = jnp.concatenate([joined, rest])
        return self.laid_out(joined, 0)

    def laid_out(self, array: Any, dim: int) -> Any:
        """Return the array with its rows, in this dim, split over the devices."""
        if self.layout.is_fully_replicated:
            return array
        spec = PartitionSpec(*[None] * dim, *self.layout.spec)
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.layout.mesh, spec))
