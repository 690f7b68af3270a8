"""What branches refuse, in words."""

import keras
import numpy as np
import pytest

import lockstep
from lockstep.errors import DeviceError, DeviceNotFound, LayoutConflict, UnsupportedModel
from tests.conftest import BACKEND
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


def test_steps_that_branches_cannot_run():
    options, words = {
        "jax": ({"run_eagerly": True}, "run_eagerly or jit_compile=False"),
        "tensorflow": ({"run_eagerly": True}, "run_eagerly=True was requested"),
        "torch": ({"jit_compile": True}, "jit_compile=True does not support"),
    }[BACKEND]
    model = lockstep.place(chain(), {"dense_1": 1})
    model.compile("sgd", "mse", **options)
    with pytest.raises(UnsupportedModel, match=words):
        model.fit(*rows(), verbose=0)


def test_branches_and_copies_at_once():
    model = lockstep.place(chain(), {"dense_1": 1})
    with pytest.raises(LayoutConflict, match=r"lockstep\.distribute.*\n.*\n.*lockstep\.release"):
        lockstep.distribute(model, 2)
    lockstep.distribute(lockstep.release(model), 2)
    with pytest.raises(LayoutConflict, match=r"lockstep\.place"):
        lockstep.place(model, {"dense_1": 1})


def test_a_variable_that_another_model_has_elsewhere():
    model = chain()
    lockstep.place(model, {"dense_1": 1})
    part = keras.Sequential([keras.Input((8,)), model.get_layer("dense_1")])
    with pytest.raises(LayoutConflict, match="shared with"):
        lockstep.place(part, {"dense_1": 2})
    lockstep.place(part, {"dense_1": 1})
