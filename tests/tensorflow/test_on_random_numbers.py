"""Replicas draw random numbers of their own, from the layer's seed and their number."""

import keras
import numpy as np
import pytest
from keras import layers

import lockstep


class Keeps(keras.metrics.Metric):
    """Keeps the outputs of the last batch."""

    def __init__(self, rows, width):
        super().__init__(name="keeps")
        self.kept = self.add_weight(shape=(rows, width), initializer="zeros", name="kept")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.kept.assign(y_pred)

    def result(self):
        return keras.ops.sum(self.kept)

    def reset_state(self):
        pass


class OwnDropout(layers.Layer):
    """Dropout as a layer of the user's own."""

    def __init__(self, rate, seed):
        super().__init__()
        self.rate = rate
        self.seeds = keras.random.SeedGenerator(seed)

    def call(self, x, training=False):
        return keras.random.dropout(x, self.rate, seed=self.seeds) if training else x


class SharedDropout(layers.Layer):
    """Dropout that draws from the seeds that all layers share, and is the first to do so."""

    def __init__(self, rate, seed):
        super().__init__()
        self.rate = rate

    def call(self, x, training=False):
        return keras.random.dropout(x, self.rate) if training else x


def dropped(devices, rows=8, width=200, seed=5, dropout=layers.Dropout):
    """What dropout makes of ones, in two training steps."""
    keras.utils.set_random_seed(3)  # forgets the seeds that layers share
    keeps = Keeps(rows, width)
    inputs = keras.Input((width,))
    scale = layers.Dense(width, kernel_initializer="identity", use_bias=False)
    model = keras.Model(inputs, dropout(0.5, seed=seed)(scale(inputs)))
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[keeps])
    lockstep.distribute(model, devices)
    ones, found = np.ones((rows, width), "float32"), []
    for _ in range(2):
        model.train_on_batch(ones, ones)
        found.append(keras.ops.convert_to_numpy(keeps.kept))
    return np.stack(found)


@pytest.mark.parametrize("dropout", [layers.Dropout, OwnDropout, SharedDropout])
def test_no_two_replicas_and_no_two_steps_drop_the_same(dropout):
    """Stock MirroredStrategy draws one mask for all replicas."""
    found = dropped(4, dropout=dropout)
    masks = {(found[step, row] == 0).tobytes() for step in range(2) for row in range(8)}
    assert len(masks) == 16
    assert np.isin(found, [0.0, 2.0]).all()
    assert abs(found.mean() - 1.0) < 0.1


def test_the_same_seed_drops_the_same():
    np.testing.assert_array_equal(dropped(4), dropped(4))
    assert np.any(dropped(4) != dropped(4, seed=6))


def test_one_device_drops_as_keras_does():
    """The first replica draws by the seed as it is."""
    np.testing.assert_array_equal(dropped(1)[:, :2], dropped(1)[:, :2])
    whole, split = dropped(1, rows=2), dropped(4, rows=8)
    np.testing.assert_array_equal(whole, split[:, :2])
