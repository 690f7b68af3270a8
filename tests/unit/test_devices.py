import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.devices import (
    Device,
    check_visible,
    missing_rows,
    names_in_words,
    parse_devices,
    shard_rows,
)
from lockstep.engines.jax.processes import jax_group
from lockstep.errors import DeviceError, DeviceNotFound, DuplicateDevice

GPUS = [Device(f"gpu:{n}", "a GPU") for n in range(4)]
HERE = [*GPUS, Device("cpu:0", "a CPU")]


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (None, "gpu:0 gpu:1 gpu:2 gpu:3"),
        (1, "gpu:0"),
        (np.int64(2), "gpu:0 gpu:1"),
        ([0, 2], "gpu:0 gpu:2"),
        ((3,), "gpu:3"),
        (range(2), "gpu:0 gpu:1"),
        ([2, 0], "gpu:2 gpu:0"),
        ("gpu:1", "gpu:1"),
        ("gpu:0,gpu:1", "gpu:0 gpu:1"),
        ("0, 1", "gpu:0 gpu:1"),
        (["gpu:0", "gpu:3"], "gpu:0 gpu:3"),
        ("/gpu:0,/device:GPU:1", "gpu:0 gpu:1"),
        ("cuda:2", "gpu:2"),
        ("cpu:0", "cpu:0"),
        (["GPU:0", 1], "gpu:0 gpu:1"),
    ],
)
def test_every_spelling(asked, names):
    assert " ".join(parse_devices(asked, HERE)) == names


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (0, DeviceError),
        (-1, DeviceError),
        (5, DeviceNotFound),
        (True, DeviceError),
        ([True], DeviceError),
        (2.0, DeviceError),
        ([], DeviceError),
        ("", DeviceError),
        ("2", DeviceError),
        (b"2", DeviceError),
        ([0, 0], DuplicateDevice),
        ("gpu:1,/gpu:1", DuplicateDevice),
        ([7], DeviceNotFound),
        ([-1], DeviceNotFound),
        ("tpu:0", DeviceNotFound),
        ("first", DeviceError),
        (["gpu:0", None], DeviceError),
        (["gpu:0", "cpu:0"], DeviceError),
        ({"gpu": 1}, DeviceError),
    ],
)
def test_what_is_refused(asked, error):
    with pytest.raises(error) as caught:
        parse_devices(asked, HERE)
    assert type(caught.value) is error


def test_names_in_words():
    assert names_in_words(["gpu:0"]) == "gpu:0"
    assert names_in_words(["gpu:0", "gpu:1"]) == "gpu:0, gpu:1"
    assert names_in_words(["gpu:1", "gpu:2", "gpu:3"]) == "gpu:1 to gpu:3"
    assert names_in_words(["gpu:3", "gpu:2", "gpu:1"]) == "gpu:3, gpu:2, gpu:1"
    assert names_in_words(["gpu:0", "gpu:1", "gpu:2", "cpu:0"]) == "gpu:0, gpu:1, gpu:2, cpu:0"


@pytest.mark.parametrize("visible", [None, "0,1,2,3", "0, 1, 2, 3", "0,1,2,3,9"])
def test_cuda_visible_devices_in_time(visible):
    check_visible(HERE, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


@pytest.mark.parametrize("visible", ["0, 1", "", "-1", "2"])
def test_cuda_visible_devices_set_too_late_is_told(visible):
    with pytest.raises(DeviceError, match="after the backend had started"):
        check_visible(HERE, {"CUDA_VISIBLE_DEVICES": visible})


def test_cuda_visible_devices_says_nothing_about_cpus():
    check_visible([Device("cpu:0", "")], {"CUDA_VISIBLE_DEVICES": ""})


ROWS = st.integers(0, 10_000)
REPLICAS = st.integers(1, 600)


@given(ROWS, REPLICAS)
def test_every_row_is_in_one_shard_in_order(rows, replicas):
    shards = shard_rows(rows, replicas)
    assert len(shards) == replicas
    assert [row for shard in shards for row in shard] == list(range(rows))


@given(ROWS, REPLICAS)
def test_no_shard_is_larger_than_its_share(rows, replicas):
    assert max(map(len, shard_rows(rows, replicas))) == -(-rows // replicas)


@given(ROWS, REPLICAS)
def test_missing_rows_make_it_divisible(rows, replicas):
    assert (rows + missing_rows(rows, replicas)) % replicas == 0
    assert 0 <= missing_rows(rows, replicas) < replicas


def test_a_broadcast_is_cut_into_buckets():
    values = [np.zeros(size, "uint8") for size in (3, 2, 9, 1, 1)]
    sizes = [[each.nbytes for each in bucket] for bucket in jax_group._buckets(values, 5)]
    assert sizes == [[3, 2], [9], [1, 1]]
