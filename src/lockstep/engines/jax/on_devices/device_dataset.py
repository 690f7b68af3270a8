"""The data of a fit on the devices, and the batches that are gathered there."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.devices import missing_rows
from lockstep.engines.jax.on_devices.padded import PaddedArray, laid_out
from lockstep.training.arrays import Arrays


class DeviceDataset:
    """Hold the arrays of one data set on every device of a mesh.

    A batch is given by row numbers. Each device gathers the rows of its shard.

    Args:
        arrays: The data set.
        by_rows: The layout of a batch.
        may_change: Whether user code may write into the arrays between two epochs.

    Attributes:
        arrays: The host arrays of the data on the mesh.
        may_change: Whether the arrays are placed again for each epoch.
        gone: Whether the arrays have been removed from the devices.
    """

    def __init__(self, arrays: Arrays, by_rows: NamedSharding, *, may_change: bool = True) -> None:
        self.may_change = may_change
        self.gone = False
        self._by_rows = by_rows
        self._replicas: int = by_rows.mesh.size
        self._everywhere = NamedSharding(by_rows.mesh, PartitionSpec())
        self.place(arrays)

    def place(self, arrays: Arrays) -> None:
        """Put these arrays on every device, and replace earlier ones."""
        self.arrays, self._placed = arrays, ()
        self._placed = jax.block_until_ready(tuple(map(self._on_every_device, arrays.leaves)))

    def leave(self) -> None:
        """Free the devices: the next batches come from the host."""
        self.gone = True
        self._placed = ()

    def batch_bytes(self, rows: int) -> int:
        """Return the bytes of a batch of `rows` rows."""
        return sum(array.nbytes // len(array) * rows for array in self.arrays.leaves)

    def batch(self, rows: np.ndarray) -> Any:
        """Gather the rows of these numbers, laid out as a batch.

        Args:
            rows: Row numbers; for several steps, one line of them for each step.
        """
        count = rows.shape[-1]
        missing = missing_rows(count, self._replicas)
        if missing:
            padding = np.repeat(rows[..., -1:], missing, axis=-1)
            rows = np.concatenate([rows, padding], axis=-1)
        taken: tuple[jax.Array, ...] = _taken(self._placed, rows, self._by_rows)
        if self._replicas == 1:
            return self.arrays.pack(taken)
        return self.arrays.pack(tuple(PaddedArray(leaf, count) for leaf in taken))

    def _on_every_device(self, array: np.ndarray) -> jax.Array:
        dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
        # A copy: JAX on a CPU may keep the memory of a host array.
        return laid_out(np.array(array, dtype), self._everywhere)


# At the level of the module, so that JAX keeps the program and not the data.
@partial(jax.jit, static_argnums=2)
def _taken(
    arrays: tuple[jax.Array, ...], rows: jax.Array, by_rows: NamedSharding
) -> tuple[jax.Array, ...]:
    steps = [None] * (rows.ndim - 1)
    layout = NamedSharding(by_rows.mesh, PartitionSpec(*steps, *by_rows.spec))
    rows = jax.lax.with_sharding_constraint(rows, layout)
    taken = tuple(array[rows] for array in arrays)
    return tuple(jax.lax.with_sharding_constraint(taken, layout))


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["data"])
@dataclass(frozen=True)
class IndexBatch:
    """A batch on the devices: row numbers of a data set.

    Attributes:
        rows: The numbers; for several steps, one line of them for each step.
        data: The data set.
    """

    rows: np.ndarray
    data: DeviceDataset

    @property
    def nbytes(self) -> int:
        """The bytes of the rows."""
        return self.data.batch_bytes(self.rows.size)

    def placed(self) -> Any:
        """Gather the batch on the devices."""
        return self.data.batch(self.rows)
