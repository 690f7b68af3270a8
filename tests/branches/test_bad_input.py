"""What branches refuse, in words."""

import keras
import numpy as np
import pytest

import lockstep
from lockstep.errors import DeviceError, DeviceNotFound, UnsupportedModel
from tests.every_backend.branch_models import chain, rows


def test_a_name_that_matches_nothing():
    with pytest.raises(UnsupportedModel, match="Did you mean 'dense_1'"):
        lockstep.place(chain(), {"dens_1": 0})
    with pytest.raises(
        UnsupportedModel, match=r"matches no layer of 'sequential.*\nIts layers: input"
    ):
        lockstep.place(chain(), {"lstm*": 0})


def test_a_layer_with_two_devices():
    with pytest.raises(UnsupportedModel, match=r"cpu:0 by 'dense_\*', and cpu:1 by 'dense_1'"):
        lockstep.place(chain(), {"dense_*": 0, "dense_1": 1})


def test_devices_that_are_not_here_or_are_several():
    with pytest.raises(DeviceNotFound, match="cpu:99"):
        lockstep.place(chain(), {"dense_1": 99})
    with pytest.raises(DeviceNotFound), lockstep.on("gpu:7"):
        pass
    with pytest.raises(DeviceError, match="a layer runs on only one"):
        lockstep.place(chain(), {"dense_1": "cpu:0,cpu:1"})


def test_nothing_to_place():
    with pytest.raises(UnsupportedModel, match="No device was given for any layer of 'sequential"):
        lockstep.place(chain())


def test_on_around_no_call_of_a_functional_model():
    with pytest.raises(UnsupportedModel, match="For a Sequential or subclassed model"):  # noqa: SIM117
        with lockstep.on("cpu:1"):
            keras.Sequential([keras.layers.Dense(2)])(np.zeros((2, 3)))


def test_an_error_inside_on_comes_through():
    with pytest.raises(RuntimeError, match="mine"), lockstep.on("cpu:1"):
        raise RuntimeError("mine")


def test_operations_that_run_one_by_one():
    model = lockstep.place(chain(), {"dense_1": 1})
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(UnsupportedModel, match="run_eagerly or jit_compile=False"):
        model.fit(*rows(), verbose=0)
