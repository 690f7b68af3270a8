"""A `metrics` property of the user's class, on TensorFlow."""

import warnings
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import lockstep
from lockstep.errors import UnsplitBatchWarning
from tests.conformance.common import assert_same
from tests.conformance.metrics_property import (
    MadeInCompile,
    WithoutCompiledMetrics,
    WithoutLossTracker,
    assert_trains_as_on_one_device,
)
from tests.tiers import rest


@pytest.mark.parametrize("cls", [MadeInCompile, *rest(WithoutLossTracker, WithoutCompiledMetrics)])
@pytest.mark.parametrize("before_compile", [True, False])
def test_trains_as_on_one_device(cls, before_compile):
    """Metrics that the property leaves out were variables "that no layer of it has"."""
    distribute = partial(lockstep.distribute, devices=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsplitBatchWarning)  # a layer with a metric runs whole
        assert_trains_as_on_one_device(cls, distribute, before_compile=before_compile)


class GAN(keras.Model):
    """keras.io's DCGAN in small: two optimizers, no `call`, metrics made in `compile`."""

    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((2,)), layers.Dense(4)])
        self.seeds = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real):
        rows = tf.shape(real)[0]
        made = self.generator(keras.random.normal((rows, 2), seed=self.seeds))
        labels = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            guess = self.discriminator(tf.concat([made, real], axis=0))
            d_loss = self.loss_fn(labels, guess)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        noise = keras.random.normal((rows, 2), seed=self.seeds)
        with tf.GradientTape() as tape:
            guess = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(tf.zeros((rows, 1)), guess)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


def gan():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    return GAN()


def compile_gan(model):
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01), loss)


def images():
    rows = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices(rows).batch(6)


def trained(distribute=None, *, before_compile=False):
    model = gan()
    if distribute is not None and before_compile:
        distribute(model)
    compile_gan(model)
    if distribute is not None and not before_compile:
        distribute(model)
    history = model.fit(images(), epochs=2, verbose=0).history
    return history, [keras.ops.convert_to_numpy(variable) for variable in model.variables]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")  # Keras's own
@pytest.mark.parametrize("before_compile", [True, *rest(False)])
def test_a_gan_trains_as_on_one_device(before_compile):
    many = trained(partial(lockstep.distribute, devices=3), before_compile=before_compile)
    assert_same(many, trained())
