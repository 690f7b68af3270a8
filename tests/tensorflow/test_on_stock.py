"""What stock `MirroredStrategy` gets wrong without a word, and lockstep right.

Each case is expected to fail on stock Keras; the day it passes there, it is told.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import lockstep
from tests.conformance.common import assert_same
from tests.tiers import rest

BATCH, ROWS = 8, 43  # the last batch has 3 rows; where the first is uneven, stock refuses


def _network(norm=False):
    between = [layers.BatchNormalization()] if norm else []
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, activation="tanh"), *between, layers.Dense(2)]
    )


def _masked():
    return keras.Sequential(
        [keras.Input((6,), dtype="int32"), layers.Embedding(9, 4, mask_zero=True), layers.Dense(2)]
    )


def _correlation(y_true, y_pred):
    return 1 - ops.sum(y_true * y_pred) / (ops.sum(y_pred**2) + 10)


def _rows(rng, rows):
    return [rng.normal(size=(rows, width)).astype("float32") for width in (4, 2)]


def _tokens(rng, rows):
    tokens = rng.integers(1, 9, (rows, 6)) * (np.arange(6) < rng.integers(1, 7, (rows, 1)))
    return [tokens.astype("int32"), rng.normal(size=(rows, 6, 2)).astype("float32")]


def _weighted(rng, rows):
    return [*_rows(rng, rows), rng.uniform(0, 2, rows).astype("float32")]


_mse = keras.losses.MeanSquaredError

SILENT = {
    "uneven batches": (_network, _rows, "mse", {}),
    "uneven batches, batch norm": (lambda: _network(True), _rows, "mse", {}),
    "mask": (_masked, _tokens, "mse", {}),
    "mean_with_sample_weight": (
        _network,
        _weighted,
        _mse(reduction="mean_with_sample_weight"),
        {},
    ),
    "scalar custom loss": (_network, _rows, _correlation, {}),
    "global_clipnorm": (_network, _rows, "mse", {"global_clipnorm": 0.05}),
    "gradient accumulation": (_network, _rows, "mse", {"gradient_accumulation_steps": 2}),
}


def _train(name, distribute=None):
    make, draw, loss, options = SILENT[name]
    keras.utils.set_random_seed(1)
    made = make()
    made.compile(keras.optimizers.SGD(0.1, momentum=0.9, **options), loss)
    if distribute:
        distribute(made)
    x, y, *weight = draw(np.random.default_rng(0), ROWS)
    kwargs = {"sample_weight": weight[0]} if weight else {}
    made.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=2, **kwargs)
    return made.get_weights()


@pytest.mark.whole
@pytest.mark.parametrize("name", SILENT)
def test_lockstep(name):
    assert_same(_train(name, lambda made: lockstep.distribute(made, 3)), _train(name))


@pytest.mark.xfail(strict=True, raises=(AssertionError, RuntimeError))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", rest(*SILENT))
def test_stock(name):
    one = _train(name)
    across = tf.distribute.ReductionToOneDevice()
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=across).scope():
        two = _train(name)
    assert_same(two, one)
