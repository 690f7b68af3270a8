"""Evaluating and predicting return what they change, and nothing else."""

import jax
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from tests.conformance import common
from tests.conformance.common import assert_same, weights
from tests.conformance.side_by_side import BATCH, smooth

X, Y = common.data(6 * BATCH)


def returned(made, kind, groups):
    """How many arrays the program of one step returns."""
    getattr(made, f"make_{kind}_function")()
    step = getattr(made, f"{kind}_function")
    state = made._get_jax_state(**dict.fromkeys(groups, True))
    placed = step.place((X[:BATCH], Y[:BATCH]))
    return len(jax.tree.leaves(step.run.lower(step.settle(state), placed).out_info))


@pytest.mark.parametrize("devices", [1, 3])
def test_weights_are_not_among_the_outputs(devices):
    made = lockstep.distribute(smooth(), devices)
    made.evaluate(X, Y, batch_size=BATCH, verbose=0)
    both = ["trainable_variables", "non_trainable_variables"]
    metrics = len(made.metrics_variables)
    assert returned(made, "test", [*both, "metrics_variables"]) == metrics + len(made.metrics)
    assert returned(made, "predict", both) == 1
    # Training returns all of them.
    of_training = [*both, "optimizer_variables", "metrics_variables"]
    every = len(made.variables) + len(made.optimizer.variables)
    assert returned(made, "train", of_training) >= every


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
