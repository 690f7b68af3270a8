"""Evaluating and predicting change what the model's code changes, and nothing else."""

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from tests.conformance import common
from tests.conformance.common import assert_same, weights
from tests.conformance.side_by_side import BATCH, smooth

X, Y = common.data(6 * BATCH)


class Calls(keras.callbacks.Callback):
    """Calls a function between two steps, that knows the model without asking for it."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def between(self, batch, logs=None):
        if batch == 2:
            self.function()

    on_test_batch_end = on_predict_batch_end = between


def called(made, kind, function=None):
    rows = {"x": X, "y": Y} if kind == "evaluate" else {"x": X}
    callbacks = None if function is None else [Calls(function)]
    return getattr(made, kind)(**rows, batch_size=BATCH, verbose=0, callbacks=callbacks)


KINDS = pytest.mark.parametrize("kind", ["evaluate", "predict"])
DEVICES = pytest.mark.parametrize("devices", [1, 3])


@pytest.mark.each_value_once
@KINDS
@DEVICES
@pytest.mark.parametrize("asks", [False, True])
def test_weights_assigned_between_two_steps_are_what_keras_makes_of_them(kind, devices, asks):
    """Where the callback has not asked for the model, Keras forgets them."""

    def run(distributed):
        made = smooth()
        if distributed:
            lockstep.distribute(made, devices)
        half = [value / 2 for value in made.get_weights()]
        callback = Calls(lambda: (callback.model if asks else made).set_weights(half))
        rows = {"x": X, "y": Y} if kind == "evaluate" else {"x": X}
        found = getattr(made, kind)(**rows, batch_size=BATCH, verbose=0, callbacks=[callback])
        return [found, weights(made), called(made, kind)]

    assert_same(run(True), run(False))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("evaluate", "fit"),
        ("evaluate", "ask"),
        ("predict", "ask"),
    ],
)
def test_what_is_done_with_the_model_between_two_steps_finds_its_weights(kind, what):
    def act():
        if what == "ask":
            inside.append(called(made, "predict"))
        else:
            made.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)

    right = smooth()
    if what == "fit":
        right.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    made, inside = lockstep.distribute(smooth(), 3), []
    called(made, kind)
    before = called(smooth(), kind)
    found = called(made, kind, act)
    if what != "fit":  # the rows after it have other weights
        assert_same(found, before)
    assert_same(weights(made), weights(right))
    assert_same(called(made, kind), called(right, kind))
    for rows in inside:
        assert_same(rows, called(right, "predict"))


def test_states_of_metrics_mix_with_weights_after_a_call():
    made = lockstep.distribute(smooth(), 3)
    made.fit(X, Y, batch_size=BATCH, verbose=0)
    called(made, "evaluate")
    for variable in made.metrics_variables:
        sums = made.trainable_variables[0].value.sum() + variable.value
        assert len(sums.devices()) == 3


def test_results_of_metrics_are_computed_on_one_device():
    made = lockstep.distribute(smooth(), 3)
    devices = []

    class Notes(keras.metrics.MeanAbsoluteError):
        def result(self):
            if not keras.src.backend.common.stateless_scope.in_stateless_scope():
                devices.append(len(self.total.value.devices()))
            return super().result()

    made.compile("sgd", "mse", metrics=[Notes()])
    made.fit(X, Y, batch_size=BATCH, verbose=0)
    called(made, "evaluate")
    assert len(devices) >= 2
    assert set(devices) == {1}
    assert {len(variable.value.devices()) for variable in made.trainable_variables} == {3}


def aligned(array):
    """A copy that JAX takes over on CPUs as it is, because it begins at a multiple of 64 bytes."""
    memory = np.zeros(array.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.each_value_once
@KINDS
@DEVICES
@pytest.mark.parametrize("when", ["before", "after"])
def test_arrays_that_were_assigned_may_be_written_into(kind, devices, when):
    def run(distributed):
        made = smooth()
        if distributed and when == "after":
            lockstep.distribute(made, devices)
        given = [aligned(np.asarray(variable.value)) for variable in made.weights]
        for variable, array in zip(made.weights, given, strict=True):
            variable.assign(array)
        if distributed and when == "before":
            lockstep.distribute(made, devices)
        found = [called(made, kind)]
        for array in given:
            array *= 3
        found += [called(made, kind), weights(made)]
        made.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        return [*found, weights(made)]

    assert_same(run(True), run(False))


class Shrinks(keras.Sequential):
    """Changes weights where it evaluates, and gives them back in tuples."""

    def test_step(self, state, data):
        logs, (trainable, others, metrics) = super().test_step(state, data)
        return logs, (tuple(value * 0.9 for value in trainable), others, metrics)


class Counts(layers.Layer):
    """Counts its calls, in training or not, and adds the number to what it is given."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs + 0.1 * self.calls


def sequence(kind, *more):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    made = kind([keras.Input((4,)), layers.Dense(6, "tanh"), *more, layers.Dense(2)])
    made.compile("sgd", "mse", metrics=["mae"])
    return made


@pytest.mark.each_value_once
@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("kind", ["a test_step that changes weights", "a layer that counts calls"])
def test_what_a_step_changes_is_kept(kind, devices, times):
    def run(distributed):
        made = sequence(Shrinks) if "weights" in kind else sequence(keras.Sequential, Counts())
        made.compile("sgd", "mse", metrics=["mae"], steps_per_execution=times)
        if distributed:
            lockstep.distribute(made, devices)
        found = [made.evaluate(X, Y, batch_size=BATCH, verbose=0)]
        found.append(made.predict(X, batch_size=BATCH, verbose=0))
        made.fit(X, Y, batch_size=BATCH, shuffle=False, validation_data=(X, Y), verbose=0)
        found.append(made.evaluate(X, Y, batch_size=BATCH, verbose=0))
        return [*found, weights(made)]

    assert_same(run(True), run(False))


def test_arrays_taken_out_of_the_model_outlive_an_evaluation():
    made = lockstep.distribute(smooth(), 2)
    held = [variable.value for variable in made.variables]
    before = [np.asarray(value) for value in held]
    made.evaluate(X, Y, batch_size=BATCH, verbose=0)
    made.predict(X, verbose=0)
    assert_same(held, before, atol=0)


def test_an_interrupted_evaluation_leaves_the_model_as_it_was():
    class Interrupts(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    made = lockstep.distribute(smooth(), 3)
    before = weights(made)
    with pytest.raises(KeyboardInterrupt):
        made.evaluate(X, Y, batch_size=BATCH, verbose=0, callbacks=[Interrupts()])
    assert_same(weights(made), before, atol=0)
    right = smooth().evaluate(X, Y, batch_size=BATCH, verbose=0)
    assert_same(made.evaluate(X, Y, batch_size=BATCH, verbose=0), right)
