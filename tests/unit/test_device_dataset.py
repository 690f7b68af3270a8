"""Batches gathered on the devices have the bits of those that the host would have sent."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.engines.jax.on_devices.device_dataset import DeviceDataset, IndexBatch
from lockstep.engines.jax.on_devices.padded import PaddedArray
from lockstep.training.arrays import Arrays

ROWS = 103


def arrays():
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(ROWS, 5)).astype("float32"),
        rng.integers(0, 256, (ROWS, 2, 3)).astype("uint8"),
        rng.integers(0, 2, ROWS).astype(bool),
        rng.integers(-9, 9, ROWS).astype("int32"),
        rng.normal(size=ROWS).astype("float16"),
        np.array([-0.0, np.nan, np.inf] * 34 + [0.0], "float32"),
    )


def of(*leaves):
    return Arrays(leaves, tuple)


def by_rows(devices):
    return NamedSharding(
        Mesh(np.array(jax.devices()[:devices]), ("batch",)), PartitionSpec("batch")
    )


def rows_of(leaf, dim):
    if isinstance(leaf, PaddedArray):
        return np.take(np.asarray(leaf.padded), range(leaf.rows), axis=dim)
    return np.asarray(leaf)


@pytest.mark.parametrize("devices", [1, 3, 4])
@pytest.mark.parametrize("shape", [(10,), (12,), (1,), (3, 10)])
def test_rows_by_their_numbers(devices, shape):
    data = DeviceDataset(of(*arrays()), by_rows(devices))
    rows = np.random.default_rng(1).permutation(ROWS)[: np.prod(shape)].reshape(shape)
    taken = IndexBatch(rows.astype("int32"), data).placed()
    for leaf, array in zip(taken, arrays(), strict=True):
        assert rows_of(leaf, rows.ndim - 1).tobytes() == array[rows].tobytes()


@pytest.mark.parametrize("devices", [1, 3])
def test_each_device_gets_its_shard_of_the_batch_alone(devices):
    data = DeviceDataset(of(*arrays()), by_rows(devices))
    leaf = jax.tree.leaves(data.batch(np.arange(12, dtype="int32")))[0]
    assert [shard.data.shape[0] for shard in leaf.addressable_shards] == [12 // devices] * devices


def test_what_is_written_into_the_arrays_arrives_when_they_are_placed_anew():
    mine = arrays()
    data = DeviceDataset(of(*mine), by_rows(2))
    rows = np.arange(4, dtype="int32")

    def first():
        return rows_of(data.batch(rows)[0], 0)

    before = first()
    mine[0][1] = 7.0
    assert first().tobytes() == before.tobytes()
    data.place(of(*mine))
    assert first().tobytes() == mine[0][:4].tobytes()
    other = (mine[0] + 1, *mine[1:])
    data.place(of(*other))
    assert first().tobytes() == other[0][:4].tobytes()


def test_bytes_of_a_batch():
    data = DeviceDataset(of(np.zeros((8, 3), "float32"), np.zeros(8, "uint8")), by_rows(1))
    assert IndexBatch(np.zeros((2, 5), "int32"), data).nbytes == 10 * (3 * 4 + 1)
