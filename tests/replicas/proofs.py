"""Which layers of the user's own are split on PyTorch and TensorFlow; the others are exact.

What only one of them knows is in its `test_on_proofs.py`.
"""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.errors import UnsplitBatchWarning
from tests.agreement import assert_equal, both
from tests.conftest import BACKEND
from tests.tables import Table
from tests.tiers import every, rest

QUICK = 1 if BACKEND == "tensorflow" else None
"""Each case traces a program on TensorFlow: there one of each table is quick."""


class Does(layers.Layer):
    """Does what it is told, and has weights, seeds and inner layers to do it with."""

    def __init__(self, what, **kwargs):
        super().__init__(**kwargs)
        self.what = what
        self.seeds = keras.random.SeedGenerator(3)
        self.dense = layers.Dense(5, activation="silu")
        self.norm = layers.BatchNormalization()
        self.drop = layers.Dropout(0.5)
        self.lstm = layers.LSTM(5, return_sequences=True)

    def build(self, shape):
        self.dense.build((None, 5))
        self.norm.build((None, 5))
        self.lstm.build((None, None, 5))
        self.kernel = self.add_weight(shape=(5, 5), name="kernel")
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def call(self, x, training=False):
        return self.what(self, x)

    def compute_output_spec(self, x, training=False):
        return keras.KerasTensor((None, 5))


def built(what, kind=Does, loss="mse", metrics=("mae",)):
    def build():
        made = keras.Sequential(
            [keras.Input((5,)), layers.Dense(5, activation="tanh"), kind(what, name="does")]
        )
        made.add(layers.Dense(2))
        made.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, metrics=list(metrics))
        return made

    return build


def data(rows=44):
    rng = np.random.default_rng(1)
    return rng.normal(size=(rows, 5)), rng.normal(size=(rows, 2))


def fit(made, x=None, y=None, batch_size=22):
    x, y = (x, y) if x is not None else data()
    options = {"batch_size": batch_size, "epochs": 2, "verbose": 0, "shuffle": False}
    return made.fit(x, y, **options).history


def assert_same_fit(build, *given, devices=3, **options):
    one, many = both(build, devices)
    assert_equal(fit(many, *given, **options), fit(one, *given, **options))
    assert_equal(many, one)
    lockstep.release(many)


# --------------------------------------------------------------------------- row by row


def _merged_and_back(layer, x):
    steps = ops.reshape(layer.dense(ops.reshape(x, (-1, 1)) * ops.ones((1, 5))), (-1, 5, 5))
    return ops.max(steps, axis=1)


def _heads(layer, x):
    rows = ops.shape(x)[0]
    split = ops.transpose(ops.reshape(x, (rows, 5, 1)) * ops.ones((1, 1, 4)), (0, 2, 1))
    scores = ops.softmax(ops.einsum("bhd,bkd->bhk", split, split) / 2.0)
    return ops.mean(ops.matmul(scores, split), axis=1)


def _positions(layer, x):
    steps = ops.repeat(x[:, None, :], 3, axis=1)
    places = ops.cast(ops.arange(3), x.dtype)[None, :, None]
    return ops.sum(steps + places, axis=1)


def _counts_steps(layer, x):
    layer.seen.assign_add(1.0)
    return x * (1 + layer.seen)


BY_ROWS = Table(
    {
        "elementwise": lambda layer, x: ops.tanh(x) * 2 + ops.where(x > 0, x, -x),
        "a kernel and swish": lambda layer, x: ops.silu(ops.matmul(x, layer.kernel)),
        "layers of Keras": lambda layer, x: layer.norm(layer.dense(x)),
        "an RNN of Keras": lambda layer, x: layer.lstm(x[:, None, :] * ops.ones((1, 4, 1)))[:, -1],
        "softmax over columns": lambda layer, x: ops.softmax(x, axis=-1) - ops.cumsum(x, axis=1),
        "layer norm by hand": lambda layer, x: (
            (x - ops.mean(x, -1, keepdims=True)) / ops.std(x, axis=-1, keepdims=True)
        ),
        "rows merged, and back": _merged_and_back,
        "attention by hand": _heads,
        "positions along a sequence": _positions,
        "a table looked up": lambda layer, x: ops.take(
            layer.kernel, ops.cast(ops.clip(x, 0, 4), "int32")[:, 0], axis=0
        ),
        "columns taken apart": lambda layer, x: ops.concatenate(
            ops.split(x, 5, axis=1)[::-1], axis=1
        ),
        "the largest first": lambda layer, x: ops.top_k(x, 5)[0] + ops.flip(x, axis=1),
        "a counter of steps": _counts_steps,
        "zeros as many as rows": lambda layer, x: x + ops.zeros((ops.shape(x)[0], 5)),
    }
)


@pytest.mark.parametrize("what", every(3, BY_ROWS, quick=QUICK))
def test_what_works_row_by_row_is_split(what):
    """A warning that it is not split would fail the test."""
    if BACKEND == "torch":  # the last batch has one row, for three devices
        x, y = data(41)
        assert_same_fit(built(BY_ROWS[what]), x, y, batch_size=10)
    else:
        assert_same_fit(built(BY_ROWS[what]), devices=2)


def test_a_functional_model_that_was_never_called_is_split():
    """Its first call was taken for one that changes attributes. A warning fails the test."""

    def summed():
        inputs = keras.Input((5,))
        inner = keras.Model(inputs, inputs + layers.Dense(5, activation="tanh")(inputs))
        made = keras.Model(inputs, layers.Dense(2)(inner(inputs) * 2 + inputs))
        made.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])
        return made

    one, many = both(summed, 2)
    mine, alone = (made.predict(data()[0], batch_size=22, verbose=0) for made in (many, one))
    assert_equal(mine, alone)
    assert_equal(fit(many), fit(one))
    lockstep.release(many)


def test_an_attention_with_a_mask_for_all_rows_is_split():
    """A warning that it is not split would fail the test."""

    def make():
        inputs = keras.Input((5,))
        steps = layers.Reshape((5, 1))(inputs)
        mask = np.tril(np.ones((5, 5), bool))
        steps = layers.MultiHeadAttention(2, 3)(steps, steps, attention_mask=mask)
        made = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(steps)))
        made.compile(keras.optimizers.SGD(0.02), "mse")
        return made

    assert_same_fit(make, devices=2)


# -------------------------------------------------------------------------- across rows


def _last_rows(layer, x):
    return ops.concatenate([x[:14], 0.5 * x[14:]], axis=0)


def _counts_rows(layer, x):
    layer.seen.assign_add(ops.cast(ops.shape(x)[0], layer.seen.dtype))
    return x * layer.seen / 100


def _adds_a_loss_of_rows(layer, x):
    layer.add_loss(ops.mean(x**2))
    return x


def statistics(layer, x):
    mean, variance = ops.moments(x, [0])
    return (x - mean) * ops.rsqrt(variance + 1e-3)


ACROSS = Table(
    {
        "rows from the fifteenth on": _last_rows,
        "statistics by hand": statistics,
        "a counter of rows": _counts_rows,
        "a loss of rows": _adds_a_loss_of_rows,
        "the number of rows": lambda layer, x: x / ops.cast(ops.shape(x)[0], x.dtype),
        "the number of a row": lambda layer, x: (
            x + ops.cast(ops.arange(ops.shape(x)[0]), x.dtype)[:, None] / 99
        ),
        "as many constants as rows": lambda layer, x: (
            x
            * ops.reshape((ops.arange(44 * 5, dtype=x.dtype) / 220)[: ops.shape(x)[0] * 5], (-1, 5))
        ),
        "rows sorted": lambda layer, x: x + ops.sort(x, axis=0),
        "the first row": lambda layer, x: x - x[:1],
        "every second row, twice": lambda layer, x: x + 0.01 * ops.sum(x[::2]),
        "rows merged with columns": lambda layer, x: x * ops.mean(ops.reshape(x, (-1,))),
        "one number drawn for all rows": lambda layer, x: (
            x + keras.random.uniform((1, 5), seed=layer.seeds)
        ),
        "numbers drawn with a number for a seed": lambda layer, x: (
            x + keras.random.uniform(ops.shape(x), seed=3)
        ),
        "rows looked up": lambda layer, x: ops.take(
            x, ops.flip(ops.arange(ops.shape(x)[0])), axis=0
        ),
        "transposed": lambda layer, x: (
            ops.matmul(x, layer.kernel) + 0.01 * ops.sum(ops.matmul(ops.transpose(x), x), axis=0)
        ),
    }
)


@pytest.mark.parametrize("what", every(5, ACROSS, quick=QUICK))
def test_what_looks_across_rows_sees_the_whole_batch(what):
    with pytest.warns(UnsplitBatchWarning, match=r"every device runs 'does' \("):
        assert_same_fit(built(ACROSS[what]))


def test_a_layer_across_rows_with_a_regularizer_of_what_it_gives():
    def build():
        made = built(statistics)()
        made.get_layer("does").activity_regularizer = keras.regularizers.L2(0.1)
        return made

    with pytest.warns(UnsplitBatchWarning, match="'does'"):
        assert_same_fit(build)


@pytest.mark.parametrize("rows", [2, *rest(1, 5, 44)])
def test_predictions_of_any_number_of_rows(rows):
    one, many = both(built(_last_rows))
    x, _ = data(rows)
    with pytest.warns(UnsplitBatchWarning):
        mine = many.predict(x, batch_size=44, verbose=0)
    assert_equal(mine, one.predict(x, batch_size=44, verbose=0))
    lockstep.release(many)


def test_a_layer_that_looks_at_the_static_rows_of_a_batch_sees_those_of_one_device():
    x, y = data(28)

    def on_batches(made):
        logs = [made.train_on_batch(x[i : i + 7], y[i : i + 7]) for i in range(0, 28, 7)]
        return logs, made.predict_on_batch(x[:7])

    one, many = both(built(lambda layer, x: x / (x.shape[0] or 1)))
    with pytest.warns(UnsplitBatchWarning, match="it reads the number of rows"):
        mine = on_batches(many)
    assert_equal(mine, on_batches(one))
    assert_equal(many, one)


def _centers(self, x, training=None):
    y = ops.matmul(x, self.kernel) + self.bias
    return y - ops.mean(y, axis=0)


def test_a_class_of_keras_with_another_call_is_not_known_by_its_name(monkeypatch):
    monkeypatch.setattr(layers.Dense, "call", _centers)
    said = {
        "tensorflow": r"dense.* \(Mean\)",
        "torch": "layer of Dense with a replaced method",
    }
    with pytest.warns(UnsplitBatchWarning, match=said[BACKEND]):
        assert_same_fit(built(lambda layer, x: x * 2))


@pytest.mark.parametrize("devices", rest(3) if BACKEND == "tensorflow" else [3])
def test_float8_scales_by_the_whole_batch(devices):
    def build():
        made = keras.Sequential([keras.Input((5,)), layers.Dense(16), layers.Dense(2)])
        for layer in made.layers:
            layer.quantize("float8")
        made.compile(keras.optimizers.SGD(0.01), "mse")
        return made

    x, y = data()
    x[30:] *= 3
    with pytest.warns(UnsplitBatchWarning, match="so only the first device"):
        assert_same_fit(build, x, y, devices=devices)


# ------------------------------------------------------ a first dim that is not the batch


def _minus_its_mean(hidden):
    return hidden - ops.mean(hidden, axis=0, keepdims=True)


def _merged(hidden):
    pairs = ops.reshape(layers.Dense(4)(hidden), (-1, 2))
    return ops.reshape(layers.Dense(3)(pairs), (-1, 6))


def _twice(hidden):
    there, back = ops.split(layers.Dense(3)(ops.concatenate([hidden, -hidden], axis=0)), 2)
    return there * back


@pytest.mark.parametrize("across", [_merged, *rest(_minus_its_mean, _twice)])
def test_a_first_dim_that_is_not_the_batch_runs_on_the_first_device(across):
    """Its shape says so before a step runs."""

    def make():
        inputs = keras.Input((5,))
        made = keras.Model(inputs, layers.Dense(2)(across(layers.Dense(3)(inputs))))
        made.compile("sgd", "mse")
        return made

    said = pytest.warns(UnsplitBatchWarning, match="so only the first device")
    if BACKEND == "torch" and across is _minus_its_mean:  # each replica has the mean of all rows
        said = contextlib.nullcontext()
    with said:
        assert_same_fit(make, devices=2)
