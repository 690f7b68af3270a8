"""A copy of the state stays as it was, and the next step still writes in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.engines.jax.fit.snapshot_buffers import SnapshotBuffers

NAMES = ["kernel", "seed", "half", "empty"]
step = jax.jit(lambda values: [value + value.dtype.type(1) for value in values], donate_argnums=0)


def state(devices=1, *axes):
    mesh = jax.make_mesh((devices,), ("batch",), devices=jax.devices()[:devices])
    values = [
        np.arange(4096, dtype="float32").reshape(64, 64),
        np.array([7, 2**31], "uint32"),
        jnp.full((8,), 0.5, "bfloat16"),
        np.zeros((0, 8), "int32"),
    ]
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return [jax.device_put(jnp.array(value), sharding) for value in values]


def alone(values):
    """As a snapshot takes them: from one device, where every device has the whole of them."""
    return [v.addressable_data(0) if v.is_fully_replicated else v for v in values]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("spread", [False, True])
def test_a_copy_is_as_the_values_were_when_it_was_made(on_host, spread):
    copies = SnapshotBuffers(on_host)
    values = state(2, "batch") if spread else state(2)
    if spread:
        values = values[:3]  # no row to spread
    for _ in range(3):
        expected = [np.array(value) for value in values]
        copy = copies.of(NAMES[: len(values)], alone(values))
        values = step(values)
        for mine, theirs in zip(copy, expected, strict=True):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)


def test_on_the_host_the_next_copy_takes_the_memory_of_the_one_before():
    copies, values = SnapshotBuffers(on_host=True), state()
    first = list(copies.of(NAMES, alone(values)))
    second = list(copies.of(NAMES, alone(step(values))))
    assert all(a is b for a, b in zip(first, second, strict=True))
    # The logs of a step may have another type, and others may come.
    more = [jnp.zeros((2, 2)), jnp.ones((), "int32")]
    (kernel, loss) = copies.of(["kernel", "logs/loss"], more)
    np.testing.assert_array_equal(kernel, np.zeros((2, 2)))
    assert loss == 1


@pytest.mark.parametrize("on_host", [True, False])
def test_the_step_after_a_copy_writes_into_the_memory_of_the_state(on_host):
    copies, values = SnapshotBuffers(on_host), state()
    list(copies.of(NAMES, alone(values)))
    before = values[0].unsafe_buffer_pointer()
    assert step(values)[0].unsafe_buffer_pointer() == before
