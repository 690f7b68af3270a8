"""The check of the first step on PyTorch; the processes of its workers may run other code."""

import os

import keras

from tests.replicas.first_steps import *  # noqa: F403
from tests.replicas.first_steps import assert_found, model_of


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
