"""`predict` with several steps in one program gives the rows that Keras gives, in order."""

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.engines.jax.steps.padded import StackedRows
from tests.conformance import common
from tests.conformance.common import assert_same
from tests.conformance.side_by_side import both, smooth
from tests.conformance.test_steps_per_execution import at_once, together

__all__ = ["together"]  # a fixture

X = common.data(6 * 4 + 1)[0]  # six batches of four rows, and one of one


class Outputs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.kept = []

    def on_predict_batch_end(self, batch, logs=None):
        self.kept.append((batch, np.asarray(logs["outputs"])))


@pytest.mark.parametrize(
    ("times", "devices", "programs"),
    [(3, 1, [3, 3]), (3, 3, [3, 3]), (4, 2, [4, 2]), (20, 4, [6])],
)
def test_rows_and_what_callbacks_get_are_those_of_keras(
    times, devices, programs, together, tmp_path
):
    def script(made, folder):
        outputs = Outputs()
        predicted = at_once(made, times).predict(X, batch_size=4, verbose=0, callbacks=[outputs])
        alone = made.predict(X, batch_size=4, verbose=0)
        return (
            [batch for batch, _ in outputs.kept],
            [kept for _, kept in outputs.kept],
            [
                predicted,
                alone,
            ],
        )

    one, many = both(script, tmp_path, devices)
    assert together == programs * 2
    assert many.returned[0] == one.returned[0]
    assert [each.shape for each in many.returned[1]] == [each.shape for each in one.returned[1]]
    assert_same(many.returned[1:], one.returned[1:])
    assert many.returned[2][0].shape == (len(X), 2)


@pytest.mark.parametrize("devices", [1, 3])
def test_several_outputs_and_vectors(devices, together, tmp_path):
    def build():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((4,))
        hidden = layers.Dense(5, activation="tanh")(inputs)
        outputs = {"rows": hidden, "of a vector": keras.ops.sum(hidden, axis=-1)}
        outputs["of none"] = hidden[:, 5:]
        made = keras.Model(inputs, outputs)
        made.compile("sgd", steps_per_execution=5)
        return made

    expected = build().predict(X, batch_size=4, verbose=0)
    assert not together
    found = lockstep.distribute(build(), devices).predict(X, batch_size=4, verbose=0)
    assert together == [5]
    assert found["of a vector"].shape == (len(X),)
    assert found["of none"].shape == (len(X), 0)
    assert_same(found, expected)


def test_rows_are_fetched_when_all_steps_have_been_called(together, monkeypatch):
    fetch = StackedRows.__array__

    def noting(self, *args, **kwargs):
        together.append("fetched")
        return fetch(self, *args, **kwargs)

    monkeypatch.setattr(StackedRows, "__array__", noting)
    made = lockstep.distribute(at_once(smooth(), 3), 3)
    predicted = made.predict(X[:24], batch_size=4, verbose=0)
    assert together == [3, 3, "fetched", "fetched"]
    assert_same(predicted, smooth().predict(X[:24], verbose=0))


class Mean(keras.Sequential):
    def predict_step(self, state, data):
        outputs, others = super().predict_step(state, data)
        return keras.ops.mean(outputs), others


@pytest.mark.parametrize("devices", [None, 1, 3])
def test_predictions_without_rows_are_refused_as_by_keras(devices):
    made = Mean([keras.Input((4,)), layers.Dense(2)])
    made.compile("sgd", steps_per_execution=3)
    if devices:
        lockstep.distribute(made, devices)
    with pytest.raises(ValueError, match=r"(?i)zero-dimensional arrays cannot be concatenated"):
        made.predict(X, batch_size=4, verbose=0)


def test_a_seed_goes_from_step_to_step(together, tmp_path):
    """Dropout in prediction, too: its seed is the state that a step changes."""

    class Always(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(4)

        def call(self, inputs):
            return inputs + keras.random.normal(keras.ops.shape(inputs), seed=self.seeds)

    def build():
        made = keras.Sequential([keras.Input((4,)), Always()])
        made.compile("sgd", steps_per_execution=3)
        return made

    plain = build()
    made = lockstep.distribute(build(), 1)
    for _ in range(2):
        expected = plain.predict(X, batch_size=4, verbose=0)
        assert_same(made.predict(X, batch_size=4, verbose=0), expected)
    assert together == [3, 3] * 2


def test_a_convolution_on_cpu_runs_step_by_step():
    made = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(2, 3), layers.Flatten()])
    made.compile("sgd", steps_per_execution=3)
    x = np.random.default_rng(2).normal(size=(25, 8, 8, 1)).astype("float32")
    expected = made.predict(x, batch_size=4, verbose=0)
    lockstep.distribute(made, 1)
    assert_same(made.predict(x, batch_size=4, verbose=0), expected)
    function = made.predict_function
    assert function.stack(None, [x[:4], x[4:8]]) is None
