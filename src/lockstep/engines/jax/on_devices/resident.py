"""Data of a fit that stays on the devices."""

import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.engines.jax.on_devices.arrays import Arrays
from lockstep.engines.jax.on_devices.sharded import Sharded
from lockstep.shards import missing_rows


class Resident:
    """The arrays of one data set on a mesh, from which batches are gathered there.

    A batch is the rows of given numbers. Where each device has its share of the rows
    only, every device gives those that it has, and gets those of its shard of the batch.
    Bits are moved, so that what arrives is what was there.

    Args:
        arrays: The data set.
        by_rows: The layout of a batch.
        split: Whether each device has its share of the rows, rather than all of them.
            Not for a CPU, where the exchange and a step that waits for another device
            may each hold the thread that the other one needs.
        watched: Whether anybody might write into the arrays between two epochs.

    Attributes:
        arrays: What is on the mesh, as it is on the host.
        watched: Whether it has to be looked at before each epoch.
        gone: Whether the model has left the mesh, and the arrays with it.
    """

    def __init__(
        self,
        arrays: Arrays,
        by_rows: NamedSharding,
        *,
        split: bool,
        watched: bool = True,
    ) -> None:
        self.arrays = arrays
        self.watched = watched
        self.gone = False
        self._by_rows = by_rows
        self._split = split
        self._replicas: int = by_rows.mesh.size
        self._everywhere = NamedSharding(by_rows.mesh, PartitionSpec())
        self._checks = tuple(map(_check, arrays.leaves)) if watched else ()
        self._placed = tuple(map(self._place, arrays.leaves))

    def refresh(self, arrays: Arrays) -> None:
        """Place those of these arrays anew that have not the values that were placed last.

        Args:
            arrays: The same data set, in arrays of the same shapes and types.
        """
        checks = tuple(map(_check, arrays.leaves))
        found = zip(self._placed, self._checks, checks, arrays.leaves, strict=True)
        self._placed = tuple(
            placed if before == now else self._place(array) for placed, before, now, array in found
        )
        self.arrays, self._checks = arrays, checks

    def leave(self) -> None:
        """Let go of the devices: whoever asks for batches from now on takes them from the host."""
        self.gone = True
        self._placed = ()

    def batch_bytes(self, rows: int) -> int:
        """The bytes of a batch of so many rows."""
        return sum(array.nbytes // len(array) * rows for array in self.arrays.leaves)

    def batch(self, rows: np.ndarray) -> Any:
        """The rows of these numbers, laid out as a batch.

        Args:
            rows: Numbers of rows, or for several steps one line of them for each.
        """
        count = rows.shape[-1]
        missing = missing_rows(count, self._replicas)
        if missing:
            padding = np.repeat(rows[..., -1:], missing, axis=-1)
            rows = np.concatenate([rows, padding], axis=-1)
        taken: tuple[jax.Array, ...] = _taken(self._placed, rows, self._by_rows, self._split)
        if self._replicas == 1:
            return self.arrays.pack(taken)
        return self.arrays.pack(tuple(Sharded(leaf, count) for leaf in taken))

    def _place(self, array: np.ndarray) -> jax.Array:
        rows = len(array)
        missing = missing_rows(rows, self._replicas) if self._split else 0
        shape = (rows + missing, *array.shape[1:])
        dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))

        def share(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[0].indices(shape[0])
            # A copy: JAX on a CPU may keep the memory of a host array.
            mine = np.zeros((stop - start, *shape[1:]), dtype)
            there = array[start : min(stop, rows)]
            mine[: len(there)] = there
            return mine

        layout = self._by_rows if self._split else self._everywhere
        return jax.make_array_from_callback(shape, layout, share)


def _check(array: np.ndarray) -> int:
    # Not adler32: it is a sum, of which rows in another order change the upper half alone.
    return zlib.crc32(np.ascontiguousarray(array).data)


# At the level of the module, so that JAX keeps the program and not the data.
@partial(jax.jit, static_argnums=(2, 3))
def _taken(
    arrays: tuple[jax.Array, ...], rows: jax.Array, by_rows: NamedSharding, split: bool
) -> tuple[jax.Array, ...]:
    dim = rows.ndim - 1
    mesh, (axis,) = by_rows.mesh, by_rows.spec
    layout = NamedSharding(mesh, PartitionSpec(*[None] * dim, axis))
    if not split:
        rows = jax.lax.with_sharding_constraint(rows, layout)
        taken = tuple(array[rows] for array in arrays)
        return tuple(jax.lax.with_sharding_constraint(taken, layout))
    exchange = jax.shard_map(
        partial(_exchange, axis=axis, dim=dim),
        mesh=mesh,
        in_specs=(by_rows.spec, PartitionSpec()),
        out_specs=layout.spec,
    )
    return tuple(exchange(array, rows) for array in arrays)


def _exchange(mine: jax.Array, rows: jax.Array, axis: str, dim: int) -> jax.Array:
    """On one device: give the rows that are here, get those of this shard of the batch."""
    bits = _bits(mine)
    places = rows - jax.lax.axis_index(axis) * len(bits)
    here = (places >= 0) & (places < len(bits))
    given = bits[jnp.clip(places, 0, len(bits) - 1)]
    here = here.reshape(here.shape + (1,) * (given.ndim - here.ndim))
    # Of every row one device gives the bits, and all others give zero.
    given = jnp.where(here, given, jnp.zeros_like(given))
    got = jax.lax.psum_scatter(given, axis, scatter_dimension=dim, tiled=True)
    if mine.dtype == jnp.bool_:
        truth: jax.Array = got != 0
        return truth
    same: jax.Array = jax.lax.bitcast_convert_type(got, mine.dtype)
    return same


def _bits(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint8)
    bits: jax.Array = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    return bits


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["data"])
@dataclass(frozen=True)
class Chosen:
    """A batch that is on the devices: rows of a data set, by their numbers.

    Attributes:
        rows: The numbers, or for several steps one line of them for each.
        data: Where they are rows of.
    """

    rows: np.ndarray
    data: Resident

    @property
    def nbytes(self) -> int:
        """The bytes of the rows."""
        return self.data.batch_bytes(self.rows.size)

    def placed(self) -> Any:
        """The batch."""
        return self.data.batch(self.rows)


def can_stay(array: np.ndarray) -> bool:
    """Whether the rows of an array can be kept on devices: numbers or truth values."""
    return array.dtype.kind in "biuf" and len(array) < 2**31
