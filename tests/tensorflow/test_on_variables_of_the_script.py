"""A variable that a step only reads has one value for all replicas; what it changes is said."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import lockstep
from lockstep.errors import UnsplitBatchWarning
from tests.conformance.common import assert_same
from tests.precision import floats
from tests.tiers import rest

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(9, 6)), RNG.normal(size=(9, 2))
KL = []
"""The variable that the code below reaches as a global one."""


@pytest.fixture(autouse=True)
def _double():
    with floats("float64"):
        yield


class Anneals(keras.callbacks.Callback):
    def __init__(self, variable):
        super().__init__()
        self.variable = variable

    def on_train_batch_begin(self, batch, logs=None):
        self.variable.assign(0.1 * (batch + 1))


class Scales(layers.Layer):
    def call(self, x):
        return x * (1.0 + KL[0])


class Counts(layers.Layer):
    def call(self, x):
        KL[0].assign_add(0.1)
        return x * KL[0]


class Distils(keras.Model):
    """A step of its own that reads a model that is not a part of it."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.read_alone = student, (lambda: teacher)

    def call(self, x):
        return self.student(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            mine = self(x, training=True)
            far = ops.square(mine - self.read_alone()(x, training=False))
            loss = ops.mean(far) + KL[0] * ops.mean(ops.square(y - mine))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def _of_keras():
    return keras.Variable(0.0, trainable=False, dtype="float64", name="kl")


def _of_tensorflow():
    return tf.Variable(tf.constant(0.0, "float64"), name="kl")


def _net(*last):
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(2), *last]
    )


def _teacher():
    made = _net(layers.BatchNormalization())
    made.compile("sgd", "mse")
    return made


def _by_rows(variable):
    return lambda y, p: ops.mean(ops.square(y - p), -1) + variable * ops.mean(ops.abs(p), -1)


def _of_batch(variable):
    return lambda y, p: ops.mean(ops.square(y - p)) + variable * ops.mean(ops.abs(p)) ** 2


def _global(y, p):
    return ops.mean(ops.square(y - p), -1) * (1.0 + KL[0])


def _metric(seen):
    return lambda y, p: ops.mean(ops.square(y - p), -1) * seen.result()


def _counted(seen):
    def loss(y, p):
        seen.update_state(ops.mean(p))
        return ops.mean(ops.square(y - p), -1) * seen.result()

    return loss


def _distilled(teacher):
    def loss(y, p):
        far = ops.square(p - teacher(ops.concatenate([y, y, y], -1), training=False))
        return ops.mean(far, -1) + ops.mean(ops.square(y - p), -1)

    return loss


def _fit(model, **options):
    model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0, **options)


def _both(train):
    """What `train` gives on one device and on two, where it is given how to distribute."""
    found = []
    for distribute in (lambda model: None, lambda model: lockstep.distribute(model, 2)):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        model = train(distribute)
        found.append([*model.get_weights(), model.predict(X, batch_size=5, verbose=0)])
    return found


@contextlib.contextmanager
def _nothing_whole():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsplitBatchWarning)
        yield


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("made", "loss", "steps"),
    [
        (_of_keras, _by_rows, 1),
        (_of_tensorflow, lambda _: _global, 2),
        *rest((_of_tensorflow, _by_rows, 1), (_of_keras, _of_batch, 1)),
    ],
)
def test_a_value_that_a_callback_anneals_is_seen_by_every_replica(made, loss, steps):
    def train(distribute):
        KL[:] = [made()]
        model = _net(Scales())
        distribute(model)
        model.compile("adam", loss(KL[0]), metrics=["mae"], steps_per_execution=steps)
        _fit(model, callbacks=[Anneals(KL[0])])
        return model

    with _nothing_whole():
        assert_same(*_both(train), atol=1e-10)


def test_a_step_of_its_own_reads_a_model_and_a_variable_that_are_not_its_parts():
    def train(distribute):
        KL[:] = [_of_keras()]
        model = Distils(_net(), _teacher())
        distribute(model)
        model.compile("adam")
        _fit(model, callbacks=[Anneals(KL[0])])
        return model

    assert_same(*_both(train), atol=1e-10)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "when", ["after", *rest("never", "before", "after, and the student never")]
)
def test_a_loss_reads_the_present_weights_of_another_model(when):
    """Also if the other model moves to devices and back, and trains meanwhile."""

    def train(distribute):
        teacher, student = _teacher(), _net()
        if when == "before":
            distribute(teacher)
        if "student never" not in when:
            distribute(student)
        student.compile("adam", _distilled(teacher))
        _fit(student)
        if when.startswith("after"):
            distribute(teacher)
        _fit(teacher)
        _fit(student)
        lockstep.release(teacher)
        _fit(teacher)
        _fit(student)
        return student

    assert_same(*_both(train), atol=1e-10)


def test_a_metric_of_the_script_is_read_by_a_loss():
    def train(distribute):
        seen = keras.metrics.Mean()
        seen.update_state(3.0)
        model = _net()
        distribute(model)
        model.compile("sgd", _metric(seen))
        _fit(model)
        seen.update_state(0.5)
        _fit(model)
        return model

    with _nothing_whole():
        assert_same(*_both(train), atol=1e-10)


@pytest.mark.parametrize("changes", ["layer", "loss"])
def test_what_a_step_changes_and_no_layer_has_is_named_and_runs_whole(changes):
    def train(distribute):
        KL[:] = [_of_tensorflow()]
        model = _net(*([Counts()] if changes == "layer" else []))
        distribute(model)
        loss = "mse" if changes == "layer" else _counted(keras.metrics.Mean(name="seen"))
        model.compile("sgd", loss)
        _fit(model)
        return model

    names = "'kl'" if changes == "layer" else "'seen/count', 'seen/total'"
    with pytest.warns(UnsplitBatchWarning, match=f"changes variables .* its layers: {names}, so"):
        assert_same(*_both(train), atol=1e-10)
