"""What the engine cannot keep equal to one device is refused, in words."""

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.errors import DeviceNotFound, LayoutConflict, UnsupportedBackend, UnsupportedModel


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


def test_options_of_other_engines():
    refused(UnsupportedBackend, r"^data_on_devices=True was asked for", data_on_devices=True)
    refused(UnsupportedBackend, r"^prefetch=2 was asked for", prefetch=2)


def test_more_devices_than_are_here():
    with pytest.raises(DeviceNotFound, match="devices=9 was asked for"):
        lockstep.distribute(model(), 9)


def test_a_distribution_of_keras_that_reduces_gradients_too(monkeypatch):
    monkeypatch.setattr(keras.distribution, "distribution", object)
    refused(LayoutConflict, "a keras.distribution is set, which would reduce gradients too")


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


def test_a_layer_whose_output_has_other_rows_is_refused():
    model = keras.Sequential([keras.Input((4,)), Flat(), layers.Dense(2)])
    with pytest.raises(UnsupportedModel, match=r"\(Flat\) has shape \(12, 2\), and the batch"):
        lockstep.distribute(model, 3).predict(np.ones((6, 4)), verbose=0)
    lockstep.release(model)
