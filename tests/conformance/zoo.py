"""Small models of every kind that people train, each with data of its own."""

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
from keras import layers, ops

from tests.tables import Table


@dataclass(frozen=True)
class Case:
    """A model and its data.

    `build(dropout)` returns the model; `dropout` 0 takes the random part out.
    `data(rows, rng)` returns `(x, y)` with that many rows. Adam walks a bias before
    batch norm about by rounding alone, and the moving mean lags behind it, so that
    no two runs agree in evaluation, on one device either: that case has SGD only.
    """

    build: Callable
    data: Callable
    loss: object = "mse"
    metrics: object = None
    dropout: float = 0.0
    optimizers: tuple[str, ...] = ("sgd", "adamw")


def _features(*shape):
    return lambda rows, rng: rng.normal(size=(rows, *shape)).astype("float32")


def _with_targets(x, y):
    return lambda rows, rng: (x(rows, rng), y(rows, rng))


def _classes(count):
    return lambda rows, rng: rng.integers(0, count, rows)


def mlp(dropout):
    return keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(16, activation="relu"),
            layers.Dropout(dropout),
            layers.Dense(8, activation="tanh"),
            layers.Dense(1),
        ]
    )


def cnn(dropout, use_bias=False):
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(6, 3, padding="same", use_bias=use_bias),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 3, use_bias=use_bias),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(dropout),
            layers.Dense(4, activation="softmax"),
        ]
    )


def bias_before_norm(dropout):
    """Batch norm takes the mean away again, so the biases have gradient zero."""
    return cnn(dropout, use_bias=True)


def several_inputs_and_outputs(dropout):
    a = keras.Input((6,), name="a")
    b = keras.Input((5,), name="b")
    both = layers.Concatenate()([layers.Dense(8)(a), layers.Dense(8)(b)])
    hidden = layers.Dropout(dropout)(layers.Activation("gelu")(both))
    number = layers.Dense(1, name="number")(hidden)
    kind = layers.Dense(3, activation="softmax", name="kind")(hidden)
    return keras.Model({"a": a, "b": b}, {"number": number, "kind": kind})


def _several_data(rows, rng):
    x = {"a": _features(6)(rows, rng), "b": _features(5)(rows, rng)}
    return x, {"number": _features(1)(rows, rng), "kind": _classes(3)(rows, rng)}


def shared_layer(dropout):
    shared = layers.Dense(8, activation="relu")
    left, right = keras.Input((6,)), keras.Input((6,))
    difference = layers.Subtract()([shared(left), shared(right)])
    return keras.Model([left, right], layers.Dense(1)(layers.Dropout(dropout)(difference)))


def _pair_data(rows, rng):
    return [_features(6)(rows, rng), _features(6)(rows, rng)], _features(1)(rows, rng)


def nested_model(dropout):
    inside = keras.Input((8,))
    inner = keras.Model(
        inside, layers.LayerNormalization()(layers.Dense(8, activation="relu")(inside))
    )
    outside = keras.Input((4, 8))
    hidden = layers.TimeDistributed(inner)(outside)
    hidden = layers.GlobalAveragePooling1D()(layers.Dropout(dropout)(hidden))
    return keras.Model(outside, layers.Dense(2)(hidden))


@keras.saving.register_keras_serializable("conformance")
class Subclassed(keras.Model):
    def __init__(self, dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        self.dropout = dropout
        self.hidden = [layers.Dense(8, activation="relu") for _ in range(2)]
        self.drop = layers.Dropout(dropout)
        self.norm = layers.BatchNormalization()
        self.out = layers.Dense(1)

    def call(self, x, training=False):
        for layer in self.hidden:
            x = layer(x)
        return self.out(self.norm(self.drop(x, training=training), training=training))

    def get_config(self):
        return {**super().get_config(), "dropout": self.dropout}


def masked_lstm(dropout):
    return keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(20, 8, mask_zero=True),
            layers.LSTM(8, return_sequences=True),
            layers.Dropout(dropout),
            layers.GRU(6),
            layers.Dense(3, activation="softmax"),
        ]
    )


def _token_data(rows, rng):
    tokens = rng.integers(1, 20, (rows, 7))
    tokens[np.arange(7) >= rng.integers(1, 8, (rows, 1))] = 0
    return tokens.astype("int32"), _classes(3)(rows, rng)


def attention(dropout):
    inputs = keras.Input((6, 8))
    attended = layers.MultiHeadAttention(2, 4, dropout=dropout)(inputs, inputs)
    x = layers.LayerNormalization()(layers.Add()([inputs, attended]))
    x = layers.Add()([x, layers.Dense(8)(layers.Dense(16, activation="gelu")(x))])
    x = layers.Dropout(dropout)(layers.GlobalMaxPooling1D()(x))
    return keras.Model(inputs, layers.Dense(3)(x))


@keras.saving.register_keras_serializable("conformance")
class Penalty(layers.Layer):
    """Adds a loss that depends on every row, and one that depends on a weight."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        self.add_loss(0.01 * ops.sum(ops.abs(self.scale)))
        return x * self.scale


def added_losses(dropout):
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu", kernel_regularizer="l2", bias_regularizer="l1"),
            Penalty(),
            layers.Dropout(dropout),
            layers.Dense(1, activity_regularizer=keras.regularizers.L2(0.01)),
        ]
    )


_sparse = keras.losses.SparseCategoricalCrossentropy

ZOO = Table(
    {
        "mlp": Case(mlp, _with_targets(_features(12), _features(1)), dropout=0.3),
        "cnn": Case(
            cnn,
            _with_targets(_features(8, 8, 2), _classes(4)),
            "sparse_categorical_crossentropy",
            ["accuracy"],
            dropout=0.3,
        ),
        "bias_before_norm": Case(
            bias_before_norm,
            _with_targets(_features(8, 8, 2), _classes(4)),
            "sparse_categorical_crossentropy",
            optimizers=("sgd",),
        ),
        "several_inputs_and_outputs": Case(
            several_inputs_and_outputs,
            _several_data,
            {"number": "mse", "kind": "sparse_categorical_crossentropy"},
            {"number": ["mae"], "kind": ["accuracy"]},
            dropout=0.2,
        ),
        "shared_layer": Case(shared_layer, _pair_data, "huber", ["mae"], dropout=0.2),
        "nested_model": Case(
            nested_model, _with_targets(_features(4, 8), _features(2)), "mse", dropout=0.2
        ),
        "subclassed": Case(
            Subclassed, _with_targets(_features(6), _features(1)), "mae", ["mse"], dropout=0.2
        ),
        "masked_lstm": Case(
            masked_lstm, _token_data, "sparse_categorical_crossentropy", ["accuracy"], dropout=0.2
        ),
        "attention": Case(
            attention,
            _with_targets(_features(6, 8), _classes(3)),
            _sparse(from_logits=True),
            ["accuracy"],
            dropout=0.2,
        ),
        "added_losses": Case(
            added_losses, _with_targets(_features(6), _features(1)), "mse", ["mae"], dropout=0.2
        ),
    }
)

OPTIMIZERS = Table(
    {
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "adamw": lambda: keras.optimizers.AdamW(0.005),
    }
)
