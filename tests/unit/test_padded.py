"""Arrays of the host on their way to several devices."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.engines.jax.steps.padded import laid_out

DTYPES = ["float32", "float64", "float16", ml_dtypes.bfloat16, "int8", "uint8", "int64", "bool"]


def layout(*dims):
    return NamedSharding(Mesh(np.array(jax.devices()[:4]), ("batch",)), PartitionSpec(*dims))


def assert_alike(found, right):
    for name in ("dtype", "weak_type", "shape", "sharding", "committed"):
        assert getattr(found, name) == getattr(right, name)
    for one, other in zip(found.addressable_shards, right.addressable_shards, strict=True):
        assert (one.device, one.index) == (other.device, other.index)
        np.testing.assert_array_equal(np.asarray(one.data), np.asarray(other.data))


@pytest.mark.parametrize("dims", [(), ("batch",), (None, "batch")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_array_is_laid_out_as_jax_does_it(dtype, dims):
    array = (np.arange(48).reshape(4, 4, 3) % 7).astype(dtype)
    for each in (array, np.asfortranarray(array), array[::-1]):
        assert_alike(laid_out(each, layout(*dims)), jax.device_put(each, layout(*dims)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_so_is_a_number(dtype):
    number = np.ones((), dtype)
    assert_alike(laid_out(number, layout()), jax.device_put(number, layout()))


@pytest.mark.parametrize(
    "value",
    [np.array(["a", "b", "c", "d"]), np.ma.masked_array(np.ones(4), [1, 0, 0, 0])],
    ids=["words", "masked"],
)
def test_what_jax_refuses_is_refused_in_its_words(value):
    with pytest.raises(Exception) as right:  # noqa: PT011
        jax.device_put(value, layout("batch"))
    with pytest.raises(type(right.value)) as found:
        laid_out(value, layout("batch"))
    assert str(found.value) == str(right.value)


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="partitioned 4 times"):
        laid_out(np.ones((5, 2), "float32"), layout("batch"))
