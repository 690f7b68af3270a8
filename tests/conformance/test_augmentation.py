"""Layers with which Keras compiles no step, and lockstep does on JAX."""

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from tests.conformance.common import assert_same
from tests.tiers import further

LAYERS = {
    "RandomRotation": lambda: layers.RandomRotation(0.1),
    "RandomZoom": lambda: layers.RandomZoom(0.2),
    "RandomTranslation": lambda: layers.RandomTranslation(0.1, 0.2),
    "RandomShear": lambda: layers.RandomShear(0.2, 0.1),
    "RandomPerspective": lambda: layers.RandomPerspective(0.5),
}


@pytest.mark.parametrize("name", ["RandomRotation", *further(*list(LAYERS)[1:])])
def test_it_changes_images_as_on_one_device_without_compilation(name):
    """The truth is stock Keras, which runs such a step operation by operation."""
    x = np.random.default_rng(0).normal(size=(11, 4, 4, 2)).astype("float32")

    def outcome(devices):
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.Input((4, 4, 2)), LAYERS[name](), layers.Flatten(), layers.Dense(2)]
        )
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        if devices:
            lockstep.distribute(model, devices)
        history = model.fit(x, x[:, 0, 0], batch_size=4, epochs=2, shuffle=False, verbose=0)
        return [history.history["loss"], *model.get_weights()]

    assert_same(outcome(3), outcome(None))
