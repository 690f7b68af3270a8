"""Losses and metrics by rows on TensorFlow: what is gathered, and the logits that Keras finds."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses, metrics, ops

import lockstep
from lockstep.engines.tensorflow.exchange.replicas import TracedReplica
from lockstep.errors import UnsplitBatchWarning
from tests.conformance.common import assert_same
from tests.replicas.losses_by_rows import *  # noqa: F403
from tests.replicas.losses_by_rows import ROWS, WORDS, gathered, leaves, steps_model, words

pytestmark = pytest.mark.usefixtures("first_steps_unchecked")


def squares(y_true, y_pred):
    return ops.mean(ops.square(ops.one_hot(ops.cast(y_true, "int32"), WORDS) - y_pred), axis=-1)


def of_all(y_true, y_pred):
    return ops.mean(squares(y_true, y_pred)) * ops.max(y_pred)


@pytest.mark.parametrize(
    ("loss", "metric", "gathers"),
    [
        (squares, squares, set()),
        (of_all, squares, {"of_all"}),
        (squares, of_all, {"of_all"}),
    ],
)
def test_a_function_of_the_users_own_is_followed(loss, metric, gathers):
    def make():
        return steps_model(loss, metric)

    with_lockstep = lockstep.distribute(make(), devices=3)
    assert_same(leaves(with_lockstep, *words()), leaves(make(), *words()))
    assert gathered(with_lockstep) == gathers


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("loss", "metric", "gathers"),
    [
        (squares, squares, set()),
        (of_all, squares, {"of_all"}),
        (squares, of_all, {"of_all"}),
        (squares, metrics.MeanIoU(WORDS, sparse_y_pred=False), {"an output"}),
    ],
)
def test_outputs_are_gathered_where_somebody_uses_them(loss, metric, gathers, monkeypatch):
    asked = []

    def watched(self, value, told):
        whole = plain(self, value, told)
        if "sequential" not in told or not value.dtype.is_floating:
            return whole

        def note(array):
            asked.append(array.shape)
            return array

        # TensorFlow leaves it out where nobody uses what it gives.
        noted = tf.numpy_function(note, [whole], whole.dtype, stateful=False)
        noted.set_shape(whole.shape)
        return tf.custom_gradient(lambda w: (noted, lambda gradient: gradient))(whole)

    plain = TracedReplica.gather_replicated
    monkeypatch.setattr(TracedReplica, "gather_replicated", watched)
    made = lockstep.distribute(steps_model(loss, metric), devices=2)
    made.evaluate(*words(), batch_size=ROWS, verbose=0)
    assert bool(asked) == bool(gathers)
    assert gathered(made) == gathers - {"an output"}


class _Centered(layers.Layer):
    """Looks across the batch, and gives probabilities of almost 0 and 1."""

    def call(self, x):
        return keras.activations.softmax(60 * (x - ops.mean(x, axis=0)))


def _of_pairs(y_true, y_pred):
    each = losses.sparse_categorical_crossentropy(y_true, y_pred)
    return ops.mean(each + ops.roll(each, 1))


@pytest.mark.each_value_once
@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", _of_pairs])
@pytest.mark.parametrize("layer", [lambda: layers.Activation("softmax"), _Centered])
def test_probabilities_that_saturate(layer, loss):
    """On one device Keras finds the logits behind probabilities, and reckons with those."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 4)).astype("float32"), rng.integers(0, WORDS, ROWS)

    def make():
        keras.utils.set_random_seed(1)
        kernel = keras.initializers.RandomNormal(stddev=30)
        dense = layers.Dense(WORDS, kernel_initializer=kernel)
        model = keras.Sequential([keras.Input((4,)), dense, layer()])
        model.compile(keras.optimizers.SGD(1e-4), loss, metrics=[loss])
        return model

    many, one = lockstep.distribute(make(), devices=3), make()
    with pytest.warns(UnsplitBatchWarning) if layer is _Centered else contextlib.nullcontext():
        found = many.evaluate(x, y, verbose=0)
    right = one.evaluate(x, y, verbose=0)
    assert right[0] > 20  # of the probability that Keras takes for 0, the logarithm is -16
    np.testing.assert_allclose(found, right, rtol=1e-6)
