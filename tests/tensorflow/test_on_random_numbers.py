"""Replicas draw their rows of the random numbers of one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from keras import random as draws

import lockstep
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel
from lockstep.keras_compat import global_seed_generator
from tests.precision import floats
from tests.tiers import every, rest

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")

ROWS, STEPS, WIDTH = 11, 4, 3  # a row is no multiple of the 2 or 4 numbers of one count


@pytest.fixture(autouse=True)
def _double_precision():
    with floats("float64"):
        yield


class Does(layers.Layer):
    """Does what it is told, in training or not, and has what is needed for it."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.seeds = draws.SeedGenerator(7)
        self.drop = layers.Dropout(0.4, seed=3)
        self.attention = layers.MultiHeadAttention(2, 3, dropout=0.4, seed=4)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.what(self, x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def model(layer, *, training=None):
    options = {} if training is None else {"training": training}
    inputs = keras.Input((STEPS, WIDTH))
    x = layer(layers.Dense(WIDTH, activation="tanh")(inputs), **options)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


def both(train, make, devices, **options):
    """What a training leaves on one device, by Keras alone, and on several."""
    found = []
    for count in (None, devices):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(4)
        made = make()
        made.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", **options)
        if count:
            lockstep.distribute(made, count)
        logs = train(made)
        states = [*made.variables, global_seed_generator().state]
        found.append([*logs, *(keras.ops.convert_to_numpy(each.value) for each in states)])
    return found


def data():
    rng = np.random.default_rng(1)
    return rng.normal(size=(ROWS, STEPS, WIDTH)), rng.normal(size=(ROWS, 2))


def fit(made):
    """Three batches, of 5, 5 and 1 rows."""
    return made.fit(*data(), batch_size=5, epochs=2, verbose=0).history["loss"]


def assert_equal(train, make, devices, **options):
    one, many = both(train, make, devices, **options)
    for mine, theirs in zip(many, one, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-10)


OF_KERAS = {
    "dropout": lambda: layers.Dropout(0.4, seed=1),
    "recurrent dropout": lambda: layers.LSTM(4, dropout=0.3, recurrent_dropout=0.3, seed=1),
    "Gaussian noise": lambda: layers.GaussianNoise(0.4, seed=1),
    "Gaussian dropout": lambda: layers.GaussianDropout(0.4, seed=1),
    "alpha dropout": lambda: layers.AlphaDropout(0.4, seed=1),
    "spatial dropout": lambda: layers.SpatialDropout1D(0.4, seed=1),
    "dropout in both directions": lambda: layers.Bidirectional(
        layers.GRU(4, dropout=0.3, recurrent_dropout=0.3, seed=1)
    ),
    "dropout in stacked cells": lambda: layers.RNN(
        [layers.LSTMCell(4, dropout=0.3, seed=1), layers.GRUCell(3, recurrent_dropout=0.3, seed=2)]
    ),
    "noise at each step": lambda: layers.TimeDistributed(
        keras.Sequential([layers.Dense(3), layers.GaussianNoise(0.4, seed=1)])
    ),
}


@pytest.mark.parametrize(
    ("what", "devices"),
    [("dropout", 3), ("Gaussian noise", 2), *rest(*((what, 2) for what in OF_KERAS))],
)
def test_layers_of_keras_draw_as_on_one_device(what, devices):
    assert_equal(fit, lambda: model(OF_KERAS[what]()), devices)


BY_ROWS = {
    "normal": lambda layer, x: x + draws.normal(ops.shape(x), seed=layer.seeds),
    "uniform": lambda layer, x: x + draws.uniform((ops.shape(x)[0], 1, 1), seed=layer.seeds),
    "truncated normal": lambda layer, x: x + draws.truncated_normal(ops.shape(x), seed=layer.seeds),
    "integers": lambda layer, x: (
        x + ops.cast(draws.randint(ops.shape(x), 0, 9, "int64", seed=layer.seeds), x.dtype)
    ),
    "dropout": lambda layer, x: draws.dropout(x, 0.4, seed=layer.seeds),
    "no seed": lambda layer, x: draws.dropout(x, 0.4) * draws.uniform((ops.shape(x)[0], 1, 1)),
    "a layer that is called twice": lambda layer, x: (
        layer.drop(x, training=True) + layer.drop(x, training=True)
    ),
    "dropout of merged rows": lambda layer, x: ops.reshape(
        layer.drop(ops.reshape(x, (-1, WIDTH)), training=True), (-1, STEPS, WIDTH)
    ),
    "dropout of attention": lambda layer, x: layer.attention(x, x, training=True),
}


def predict(made):
    return made.predict(data()[0], batch_size=5, verbose=0)


@pytest.mark.parametrize("what", every(3, BY_ROWS))
def test_own_layers_draw_as_on_one_device(what):
    """A warning that one of them is not split would fail the test."""
    assert_equal(predict, lambda: model(Does(BY_ROWS[what])), 2)


NOT_BY_ROWS = {
    "one number for all rows": lambda layer, x: x + draws.uniform((1, 1, 3), seed=layer.seeds),
    "a number as seed": lambda layer, x: x + draws.uniform(ops.shape(x), seed=3),
    "order of rows": lambda layer, x: x + draws.shuffle(x, seed=layer.seeds),
    "gamma": lambda layer, x: x + draws.gamma(ops.shape(x), 2.0, seed=layer.seeds),
    "categories": lambda layer, x: (
        x + ops.cast(draws.categorical(x[:, 0], 1, seed=layer.seeds), x.dtype)[:, None]
    ),
}


@pytest.mark.parametrize("what", every(3, NOT_BY_ROWS))
def test_draws_for_all_rows_are_those_of_one_device(what):
    with pytest.warns(UnsplitBatchWarning, match="every device runs 'does' "):
        assert_equal(predict, lambda: model(Does(NOT_BY_ROWS[what])), 2)


def test_a_noise_shape_is_that_of_one_device():
    with pytest.warns(UnsplitBatchWarning, match="random numbers for all rows together"):
        assert_equal(fit, lambda: model(layers.Dropout(0.4, (None, 1, WIDTH), seed=1)), 2)


@pytest.mark.parametrize("dtype", ["mixed_float16", *rest("mixed_bfloat16", "float32")])
def test_every_type_of_float_is_drawn_as_on_one_device(dtype):
    def make():
        inputs = x = keras.Input((7,))
        for layer in (layers.Dropout(0.4, seed=1), layers.GaussianNoise(0.4, seed=2)):
            x = layer(x, training=True)
        return keras.Model(inputs, layers.Identity(dtype="float32")(x))

    def predict(made):
        return made.predict(np.ones((ROWS, 7), "float32"), batch_size=8, verbose=0)

    with floats("float32", dtype):
        one, many = both(predict, make, 3)
    for mine, theirs in zip(many, one, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_images_change_as_on_one_device():
    def make():
        changes = (
            layers.RandomFlip(seed=1),
            layers.RandomRotation(0.2, seed=2),
            layers.RandomTranslation(0.2, 0.2, seed=3),
            layers.RandomZoom(0.2, 0.1, seed=4),
            layers.RandomContrast(0.3, (0, 1), seed=5),
            layers.RandomBrightness(0.3, (0, 1), seed=6),
        )
        inputs = x = keras.Input((6, 6, 3))
        for layer in changes:
            x = layer(x, training=True)
        return keras.Model(inputs, x)

    def predict(made):
        images = np.random.default_rng(2).uniform(size=(ROWS, 6, 6, 3)).astype("float32")
        return made.predict(images, batch_size=8, verbose=0)

    with floats("float32"):  # Keras alone rotates in no other type
        one, many = both(predict, make, 3)
    for mine, theirs in zip(many, one, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


DECLARED = {
    "functions of TensorFlow": lambda layer, x: (
        tf.nn.tanh(layer.drop(x, training=True)) + draws.normal(ops.shape(x))
    ),
    "a branch": lambda layer, x: tf.cond(
        tf.reduce_sum(layer.seeds.state.value) > 0,
        lambda: draws.dropout(x, 0.4, seed=layer.seeds),
        lambda: x,
    ),
    "numbers for all rows": lambda layer, x: (
        tf.nn.tanh(x) + draws.normal((tf.shape(x)[1], 1), seed=layer.seeds)
    ),
}


@pytest.mark.parametrize("what", every(2, DECLARED))
def test_a_declared_layer_draws_as_on_one_device(what):
    assert_equal(predict, lambda: model(lockstep.rowwise(Does(DECLARED[what]))), 2)


def test_a_declared_layer_that_draws_across_rows_is_refused():
    made = model(lockstep.rowwise(Does(lambda layer, x: x + draws.shuffle(x, seed=layer.seeds))))
    made.compile("sgd", "mse")
    lockstep.distribute(made, 2)
    with pytest.raises(UnsupportedModel, match=r"'does.*' is declared row-wise"):
        made.predict(data()[0], verbose=0)


def test_a_declared_layer_draws_by_parameters_of_rows_on_the_first_device():
    what = NOT_BY_ROWS["gamma"]
    with pytest.warns(UnsplitBatchWarning, match="draws by StatelessRandomGammaV3"):
        assert_equal(predict, lambda: model(lockstep.rowwise(Does(what))), 2)


class OwnStep(keras.Model):
    """A step of the user's own that changes the rows, and runs them twice at once."""

    def __init__(self):
        super().__init__()
        self.noise = layers.GaussianNoise(0.3, seed=1)
        self.drop = layers.Dropout(0.3, seed=2)
        self.flatten, self.last = layers.Flatten(), layers.Dense(2)

    def call(self, x, training=False):
        return self.last(self.drop(self.flatten(x), training=training))

    def train_step(self, given):
        x, y = given
        x = self.noise(x, training=True)
        with tf.GradientTape() as tape:
            outputs = self(ops.concatenate([x, 2 * x]), training=True)
            loss = ops.mean((outputs - ops.concatenate([y, y])) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_a_step_of_the_users_own_draws_as_on_one_device():
    assert_equal(fit, OwnStep, 2)


def test_several_steps_at_once_draw_as_on_one_device():
    make = lambda: model(OF_KERAS["dropout"]())  # noqa: E731
    assert_equal(fit, make, 2, steps_per_execution=2)


def test_what_is_computed_again_for_the_gradient_draws_as_on_one_device():
    def make():
        with keras.RematScope(mode="full"):
            layer = Does(lambda layer, x: draws.dropout(ops.tanh(x), 0.4, seed=layer.seeds))
        return model(layer)

    assert_equal(fit, make, 2)
