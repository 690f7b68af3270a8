"""What the engine cannot keep equal to one device is refused, in words."""

import keras
import numpy as np
import pytest
import torch
from keras import layers

import lockstep
from lockstep.errors import DeviceNotFound, LayoutConflict, UnsupportedBackend, UnsupportedModel
from tests.conformance.common import assert_compile_is_refused_in


def model():
    made = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    made.compile("sgd", "mse")
    return made


def refused(error, match, **options):
    made = model()
    before = dict(vars(made))
    with pytest.raises(error, match=match):
        lockstep.distribute(made, 2, **options)
    assert vars(made) == before


def test_more_devices_than_are_here():
    with pytest.raises(DeviceNotFound, match="devices=9 was requested"):
        lockstep.distribute(model(), 9)


def test_a_distribution_of_keras_that_reduces_gradients_too(monkeypatch):
    monkeypatch.setattr(keras.distribution, "distribution", object)
    refused(LayoutConflict, "a keras.distribution is set, which also reduces gradients")


def test_keras_that_reduces_gradients_by_itself():
    """Keras 3.16 does where there is a default group of PyTorch, as `fit` begins."""
    many = lockstep.distribute(model(), 2)
    wrapped = model()
    object.__setattr__(wrapped, "ddp_model", object())
    with pytest.raises(LayoutConflict, match="Keras has wrapped it in DistributedDataParallel"):
        lockstep.distribute(wrapped, 2)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        refused(UnsupportedBackend, "but the process has called torch.distributed.init_process")
        with pytest.raises(UnsupportedBackend, match="that call, and any\nDistributedSampler"):
            many.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0)
    finally:
        torch.distributed.destroy_process_group()
    lockstep.release(many)


def test_step_functions_of_the_models_own():
    class Own(keras.Sequential):
        def make_train_function(self, force=False):
            return super().make_train_function(force)

    with pytest.raises(UnsupportedModel, match="Own has its own make_train_function"):
        lockstep.distribute(Own([keras.Input((4,)), layers.Dense(2)]), 2)


class Flat(layers.Layer):
    """Merges the batch with another dim."""

    def call(self, x):
        return keras.ops.reshape(x, (-1, 2))

    def compute_output_shape(self, shape):
        return (None, 2)


@pytest.mark.thorough
def test_a_layer_whose_output_has_other_rows_is_refused():
    model = keras.Sequential([keras.Input((4,)), Flat(), layers.Dense(2)])
    with pytest.raises(UnsupportedModel, match=r"\(Flat\) has shape \(12, 2\), and the batch"):
        lockstep.distribute(model, 3).predict(np.ones((6, 4)), verbose=0)
    lockstep.release(model)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_test_begin"])
def test_compile_in_a_running_fit_is_refused_in_words(hook):
    """Keras removes the step functions, and then calls `None`."""
    assert_compile_is_refused_in(hook)
