"""Layers that look across the batch, know its size, hold state, or draw at random."""

import keras
from keras import layers, ops

from tests.conformance.cases.case import Case, features, fitted_with, rows_of, whole_batches


def _between(*middle):
    """A small network with layers of interest in the middle, each given by its maker."""

    def make(sizes):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(6, activation="tanh")])
        for layer in middle:
            model.add(layer())
        model.add(layers.Dense(2))
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
        return model

    return make


# ------------------------------------------------------------------- across the batch


class _Across(layers.Layer):
    """A layer whose rows depend on other rows of the batch."""

    def __init__(self, look, **kwargs):
        super().__init__(**kwargs)
        self.look = look

    def call(self, x):
        return self.look(x)

    def compute_output_spec(self, x):
        width = 7 if self.look is _minibatch_deviation else x.shape[-1]
        return keras.KerasTensor((x.shape[0], width))


def _minibatch_deviation(x):
    spread = ops.mean(ops.sqrt(ops.var(x, axis=0) + 1e-3))
    return ops.concatenate([x, ops.broadcast_to(spread, (ops.shape(x)[0], 1))], axis=-1)


def _flip(x):
    return x + 0.5 * ops.flip(x, axis=0)


def _softmax_over_rows(x):
    return x * (1 + ops.softmax(x, axis=0))


def _running_sum(x):
    return ops.tanh(ops.cumsum(x, axis=0))


def _neighbours(x):
    return x - 0.5 * ops.roll(x, 1, axis=0)


def _attention_over_rows(x):
    return ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x)), axis=-1), x)


def _second_half_first(x):
    half = ops.shape(x)[0] // 2
    return ops.concatenate([x[half:], x[:half]], axis=0) * 0.5 + x


def _across(look):
    return Case(_between(lambda: _Across(look, name="across")))


# -------------------------------------------------------------- the batch size written in


def _fixed_batch(sizes):
    inputs = keras.Input(batch_shape=(sizes.batch, 4))
    pairs = layers.Dense(6, activation="tanh")(inputs)
    mixed = _Across(lambda x: x + ops.reshape(ops.arange(sizes.batch * 6.0), (-1, 6)) / 99)(pairs)
    model = keras.Model(inputs, layers.Dense(2)(mixed))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


class _Merge(layers.Layer):
    """Lays the steps of all rows behind each other, with the batch size in the shape."""

    def __init__(self, batch, **kwargs):
        super().__init__(**kwargs)
        self.batch = batch
        self.dense = layers.Dense(3, activation="tanh")

    def build(self, shape):
        self.dense.build((None, shape[-1]))

    def call(self, x):
        steps, width = x.shape[1:]
        merged = self.dense(ops.reshape(x, (self.batch * steps, width)))
        return ops.reshape(merged, (self.batch, steps * 3))


def _merged_batch(sizes):
    inputs = keras.Input((5, 3), batch_size=sizes.batch)
    model = keras.Model(inputs, layers.Dense(2)(_Merge(sizes.batch, name="merge")(inputs)))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


# -------------------------------------------------------------------------- held state


class _Remembers(layers.Layer):
    """Counts steps and rows, and keeps the largest value and a slow mean."""

    def build(self, shape):
        def state(name, shape, **kwargs):
            return self.add_weight(
                name=name, shape=shape, initializer="zeros", trainable=False, **kwargs
            )

        self.steps = state("steps", (), dtype="int32")
        self.rows = state("rows", ())
        self.largest = state("largest", (shape[-1],))
        self.mean = state("mean", (shape[-1],))

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1)
            self.rows.assign_add(ops.cast(ops.shape(x)[0], "float32"))
            self.largest.assign(ops.maximum(self.largest, ops.max(x, axis=0)))
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return (x - self.mean) / (1 + self.largest)


class _LastRow(layers.Layer):
    """Hands the last row of each batch on to the next, in prediction too."""

    def build(self, shape):
        self.last = self.add_weight(
            name="last", shape=shape[1:], initializer="zeros", trainable=False
        )

    def call(self, x):
        result = x + 0.3 * self.last
        self.last.assign(x[-1])
        return result


class _Draws(layers.Layer):
    """Draws for every row, with a seed generator of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, x, training=False):
        if not training:
            return x
        return x + 0.1 * keras.random.uniform(ops.shape(x), seed=self.seeds)


def _middle(layer, **kwargs):
    return Case(_between(lambda: layer(**kwargs)))


def _noisy_steps(sizes):
    model = keras.Sequential(
        [
            keras.Input((5, 3)),
            layers.Dense(4, activation="tanh"),
            layers.SpatialDropout1D(0.3),
            layers.LSTM(3, dropout=0.2, recurrent_dropout=0.2),
            layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


# Keras compiles no step with these, and lockstep does on JAX: see test_augmentation.py. XLA as the
# tests set it takes minutes for four of them in a row.
_COMPILED = (lambda: layers.RandomRotation(0.1), lambda: layers.RandomZoom(0.2))


def _changed_images(sizes):
    model = keras.Sequential(
        [
            keras.Input((4, 4, 2)),
            layers.RandomFlip("horizontal"),
            *(make() for make in _COMPILED if keras.backend.backend() == "jax"),
            layers.Conv2D(3, 3, activation="tanh"),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


_STEPS = rows_of(features(5, 3), features(2))

LAYERS = {
    "batch norm": _middle(layers.BatchNormalization),
    "batch norm, small momentum, no scale": _middle(
        layers.BatchNormalization, momentum=0.1, scale=False
    ),
    "batch norm, frozen": Case(
        _between(
            layers.BatchNormalization,
            lambda: layers.BatchNormalization(trainable=False),
        )
    ),
    "minibatch deviation": _across(_minibatch_deviation),
    "flipped batch": _across(_flip),
    "softmax over the batch": _across(_softmax_over_rows),
    "cumulative sum over the batch": _across(_running_sum),
    "rolled batch": _across(_neighbours),
    "attention over the batch": _across(_attention_over_rows),
    "halves of the batch swapped": _across(_second_half_first),
    "fixed batch_shape": Case(_fixed_batch, live=fitted_with(in_batches=True), sizes=whole_batches),
    "reshape with the batch size in it": Case(
        _merged_batch, _STEPS, fitted_with(in_batches=True), sizes=whole_batches
    ),
    "counters, running maximum and mean": Case(_between(_Remembers), live=fitted_with(epochs=2)),
    "last row handed to the next batch": _middle(_LastRow),
    "spectral normalization": Case(_between(lambda: layers.SpectralNormalization(layers.Dense(4)))),
    "Gaussian noise and Gaussian dropout": Case(
        _between(lambda: layers.GaussianNoise(0.2), lambda: layers.GaussianDropout(0.2))
    ),
    "alpha dropout": _middle(layers.AlphaDropout, rate=0.2),
    "spatial and recurrent dropout": Case(_noisy_steps, _STEPS),
    "random numbers of a layer's own": _middle(_Draws),
    "random flips of images": Case(_changed_images, rows_of(features(4, 4, 2), features(2))),
}
