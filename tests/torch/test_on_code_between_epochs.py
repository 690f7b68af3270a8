"""Code of the user that Keras calls between two epochs reaches every device."""

import keras
import numpy as np
from keras import layers

import lockstep

X = np.random.default_rng(0).normal(size=(12, 4))
Y = X.sum(1, keepdims=True)
SCALE = {"factor": 1.0}


class Difference(keras.metrics.Mean):
    """Changes a global that the loss reads, when Keras resets it."""

    def reset_state(self):
        SCALE["factor"] += 0.5
        super().reset_state()

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(keras.ops.mean(y_true - y_pred))


def weighted(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred) * SCALE["factor"], axis=-1)


class Counted(keras.Model):
    """Counts the calls of PyTorch's `train`, which begins each epoch."""

    def __init__(self):
        super().__init__()
        self.dense, self.times = layers.Dense(1), 0

    def train(self, mode=True):
        self.times += bool(mode)
        return super().train(mode)

    def call(self, x):
        return self.dense(x) * (1.0 + self.times)


def losses(devices, make, **compiled):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    SCALE["factor"] = 1.0
    model = make()
    model(X[:2])
    model.compile(keras.optimizers.SGD(0.01), **compiled)
    lockstep.distribute(model, devices)
    return model.fit(X, Y, batch_size=4, epochs=3, verbose=0, shuffle=False).history["loss"]


def test_a_metric_that_changes_a_global_when_it_is_reset():
    def linear():
        return keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(1)])

    found = [
        losses(devices, linear, loss=weighted, metrics=[Difference(name="difference")])
        for devices in (1, 2)
    ]
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_a_model_with_a_train_of_its_own():
    found = [losses(devices, Counted, loss="mse") for devices in (1, 2)]
    np.testing.assert_allclose(*found, rtol=1e-6)
