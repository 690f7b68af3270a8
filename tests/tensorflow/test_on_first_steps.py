"""The check of the first step on TensorFlow, where losses and metrics may work by rows too."""

import contextlib
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel
from tests.precision import floats
from tests.replicas.first_steps import *  # noqa: F403
from tests.replicas.first_steps import assert_found, contrast, data, model_of


@pytest.fixture(autouse=True)
def _double():
    with floats("float64"):
        yield


@pytest.mark.parametrize("role", [{"loss": contrast}, {"metrics": [contrast]}])
def test_a_loss_or_metric_that_is_wrongly_proven_is_computed_for_the_whole_batch(role):
    assert_found(lambda: model_of(**role))


def test_without_the_check_a_wrongly_proven_metric_is_not_found(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_found(lambda: model_of(metrics=[contrast]))


class ByStaticRows(keras.Sequential):
    """Divides by the rows of a batch, if Python knows their number."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.square(self(x, training=True) - y))
            loss = total / (x.shape[0] or 32)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("loss", [None, "mse"])
def test_a_step_that_does_not_use_the_loss_of_compile_is_compared(loss):
    x, y = np.random.default_rng(0).normal(size=(2, 12, 4))

    def losses(lay_out):
        keras.utils.set_random_seed(3)
        model = lay_out(ByStaticRows([keras.Input((4,)), keras.layers.Dense(4)]))
        model.compile("sgd", loss)
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(6, drop_remainder=True)
        return model.fit(rows, epochs=2, verbose=0, shuffle=False).history["loss"]

    with pytest.warns(UnsplitBatchWarning, match="so only the first device runs every batch"):
        many = losses(lambda model: lockstep.distribute(model, 2))
    np.testing.assert_allclose(many, losses(lambda model: model), rtol=1e-10)


class Matches(keras.layers.Layer):
    """Adds a row to each row."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, x, row):
        return self.dense(x) + self.dense(row)


class MatchesFirstRow(keras.Model):
    """Calls a layer with a batch and with one row of it."""

    def __init__(self):
        super().__init__()
        self.matches = Matches()

    def call(self, x):
        return self.matches(x, x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self.matches(x, x[: tf.minimum(tf.shape(x)[0], 1)])
            loss = tf.reduce_mean(tf.square(found - y))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def test_a_layer_that_a_step_gives_other_numbers_of_rows_is_refused_in_words():
    x, y = np.random.default_rng(0).normal(size=(2, 12, 4))
    model = lockstep.distribute(MatchesFirstRow(), 2)
    model.compile("sgd")
    with pytest.raises(UnsupportedModel, match="different numbers of rows") as refused:
        model.fit(x, y, batch_size=6, verbose=0)
    assert "lockstep.release" in str(refused.value)


def test_a_trace_that_draws_from_an_iterator_is_not_said_to_be_exact():
    """What it draws is a constant of the program, and building the model has drawn before it."""
    numbers = itertools.cycle([1.0, 0.5])
    model = model_of(lambda layer, x, training: x * next(numbers))
    lockstep.distribute(model, 2)
    with pytest.warns(UnsplitBatchWarning, match="an object of itertools.cycle") as said:
        model.fit(*data(), batch_size=6, verbose=0)
    assert not any("exact" in str(each.message) for each in said)


class Recurs(keras.layers.Layer):
    """Goes through the rows of a batch by `tf.scan`, and raises from one of its calls on."""

    def __init__(self, counted):
        super().__init__()
        self.counted = counted  # a file, as a first step puts attributes back
        self.fails_at = np.inf

    def call(self, x):
        with self.counted.open("a") as calls:
            print(end="x", file=calls)
        fails = self.counted.stat().st_size >= self.fails_at
        return tf.scan(lambda carried, row: carried + (None if fails else row), x)


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
def test_a_process_is_as_before_after_a_failure_in_each_stage_of_a_first_step(tmp_path):
    """`tf.scan` sets a caching device on the variable scope, and left it there.

    It raises while it is followed, as it takes no symbolic tensors. After that no model could be
    distributed.
    """
    x, y = np.random.default_rng(0).normal(size=(2, 5, 4))

    def compiled(*inner):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), *inner, keras.layers.Dense(4)])
        model.compile("sgd", "mse")
        return model

    def losses(model):
        return model.fit(x, y, batch_size=5, verbose=0, shuffle=False).history["loss"]

    right, also_right = losses(compiled(Recurs(tmp_path / "one"))), losses(compiled())
    done = []
    for at in (1, 2, 16, 30):  # building, a step of one device, and the traces of both
        recurs = Recurs(tmp_path / str(at))
        model = lockstep.distribute(compiled(recurs), 2)
        recurs.counted.write_text("")
        recurs.fails_at = at
        with contextlib.suppress(ValueError, TypeError, UnsupportedModel):
            losses(model)
            done.append(at)
        del model
        np.testing.assert_allclose(losses(lockstep.distribute(compiled(), 2)), also_right, 1e-10)
    assert not done
    many = losses(lockstep.distribute(compiled(Recurs(tmp_path / "many")), 2))
    np.testing.assert_allclose(many, right, rtol=1e-10)


class LogsWithoutRank(keras.Model):
    """Logs a number whose number of dims TensorFlow does not know."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {
            "loss": loss,
            "half": tf.numpy_function(lambda value: value / 2, [loss], loss.dtype),
        }


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
def test_a_log_of_an_unknown_number_of_dims():
    x, y = data()
    one, many = (
        model_of(kind=LogsWithoutRank),
        lockstep.distribute(model_of(kind=LogsWithoutRank), 3),
    )
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    found = [made.fit(x, y, **options).history for made in (one, many)]
    for name in ("loss", "half"):
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=0, atol=1e-10)
    lockstep.release(many)
