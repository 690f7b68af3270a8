"""The check of the first step on PyTorch; the processes of its workers may run other code."""

import os

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from tests.agreement import assert_equal, both
from tests.replicas.first_steps import *  # noqa: F403
from tests.replicas.first_steps import DEVICES, ROWS, assert_found, data, model_of


@pytest.mark.filterwarnings("ignore:On PyTorch every device runs 'faulty'")
def test_code_that_takes_no_small_batch_is_compared_on_the_whole_batch():
    def picky(layer, x, training):
        if len(x) < ROWS:
            raise ValueError("too few rows")
        return x - keras.ops.mean(x, axis=0)

    x, y = data()
    one, many = model_of(picky), lockstep.distribute(model_of(picky), DEVICES)
    for made in (one, many):
        made.train_on_batch(x, y)
    for a, b in zip(many.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)
    lockstep.release(many)


def test_a_worker_with_another_constant_is_found():
    here = os.getpid()

    def other_in_a_worker(layer, x, training):
        return x if os.getpid() == here else 2 * x

    assert_found(lambda: model_of(other_in_a_worker), "faulty")


def test_a_worker_with_another_loss_is_found():
    here = os.getpid()

    class Other(keras.losses.Loss):
        def call(self, y_true, y_pred):
            factor = 1.0 if os.getpid() == here else 2.0
            return factor * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

    assert_found(lambda: model_of(loss=Other()), "the gradient of")


def test_a_worker_with_another_regularizer_is_found():
    here = os.getpid()

    class Other(keras.regularizers.Regularizer):
        def __call__(self, weights):
            factor = 0.1 if os.getpid() == here else 0.3
            return factor * keras.ops.sum(keras.ops.square(weights))

    def build():
        made = model_of()
        made.layers[1].kernel.regularizer = Other()
        made.layers[1].kernel_regularizer = made.layers[1].kernel.regularizer
        return made

    assert_found(build, "the gradient of")


class ShrinksItsWeight(layers.Layer):
    """Assigns to a weight that is trained, in each training step."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(shape[-1],), initializer="ones")

    def call(self, inputs, training=False):
        if training:
            self.scale.assign(self.scale * 0.9)
        return inputs * self.scale


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
def test_a_step_that_is_tried_leaves_no_assignment_behind():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(11, 4)), rng.normal(size=(11, 2))

    def build():
        made = keras.Sequential([keras.Input((4,)), ShrinksItsWeight(), layers.Dense(2)])
        made.compile(keras.optimizers.SGD(0.05), "mse")
        return made

    one, many = both(build)
    options = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
    assert_equal(one.fit(x, y, **options).history, many.fit(x, y, **options).history)
    assert_equal(one, many)
