"""`train_on_batch`, `test_on_batch` and `predict_on_batch` are Keras's, batch by batch."""

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from tests.agreement import assert_equal, both
from tests.conformance.common import data
from tests.conftest import BACKEND
from tests.every_backend.test_in_place import compile_, model
from tests.tiers import further, quick_on_jax

DEVICES = pytest.mark.parametrize("devices", [3, *further(1)])
ROWS = 7


def assert_alike(one, many):
    """Two results have the same kind, the same names and the same values."""
    assert type(one) is type(many)
    if isinstance(one, dict):
        assert list(one) == list(many)
    assert_equal(one, many)


def of_two_inputs():
    inputs = {name: keras.Input((4,), name=name) for name in ("left", "right")}
    joined = layers.concatenate([inputs["left"], inputs["right"]])
    outputs = {name: layers.Dense(2, name=name)(joined) for name in ("one", "two")}
    made = keras.Model(inputs, outputs)
    made.compile("sgd", {"one": "mse", "two": "mae"}, metrics={"two": ["mse"]})
    return made


@quick_on_jax
@DEVICES
def test_several_inputs_and_outputs(devices):
    alone, made = both(of_two_inputs, devices)
    x, y = data(ROWS)
    rows = {"left": x, "right": 1 - x}, {"one": y, "two": 2 * y}
    weighted = (*rows, {"one": np.arange(ROWS), "two": np.ones(ROWS)})
    for batch in (rows, weighted):
        assert_alike(*[each.train_on_batch(*batch, return_dict=True) for each in (alone, made)])
        assert_alike(*[each.test_on_batch(*batch) for each in (alone, made)])
    found = [each.predict_on_batch(rows[0]) for each in (alone, made)]
    assert all(type(part) is np.ndarray for part in found[1].values())
    assert_alike(*found)
    assert_equal(alone, made)


@quick_on_jax
@pytest.mark.each_value_once
@DEVICES
@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("first", ["train", "test", "predict"])
def test_each_may_come_first(first, built, devices):
    alone, made = model(built), lockstep.distribute(model(built), devices)
    x, y = data(ROWS)
    for each in (first, "train", "test", "predict"):
        rows = (x,) if each == "predict" else (x, y)
        assert_alike(*[getattr(which, f"{each}_on_batch")(*rows) for which in (alone, made)])
    assert_equal(alone, made)


def classifier():
    made = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="softmax")])
    made.compile("sgd", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    return made


@DEVICES
def test_weights_of_rows_and_of_classes(devices):
    models = both(classifier, devices)
    x, _ = data(ROWS)
    y, rows = np.arange(ROWS) % 3, np.linspace(0, 2, ROWS)
    for arguments in (
        {"sample_weight": rows},
        {"class_weight": {0: 0.1, 1: 2.0, 2: 5.0}},
        {"class_weight": {0: 0.5, 1: 3.0, 2: 1.0}, "return_dict": True},
    ):
        assert_alike(*[each.train_on_batch(x, y, **arguments) for each in models])
    said = []
    for each in models:
        with pytest.raises(ValueError, match="cannot be specified at the same time") as refused:
            each.train_on_batch(x, y, sample_weight=rows, class_weight={0: 1.0, 1: 1.0, 2: 1.0})
        said.append(str(refused.value))
    assert said[0] == said[1]
    options = {"sample_weight": rows, "return_dict": True}
    assert_alike(*[each.test_on_batch(x, y, **options) for each in models])
    assert_equal(*models)


@quick_on_jax
@pytest.mark.skipif(BACKEND == "torch", reason="Keras has steps_per_execution=1 alone there")
@DEVICES
def test_a_batch_is_one_step_whatever_an_execution_has(devices):
    alone, made = model(), lockstep.distribute(model(), devices)
    compile_(made, steps_per_execution=3)
    x, y = data(ROWS)
    for _ in range(2):
        assert_alike(*[each.train_on_batch(x, y) for each in (alone, made)])
    assert_alike(*[each.predict_on_batch(x) for each in (alone, made)])
    assert int(made.optimizer.iterations) == 2
    assert_equal(alone, made)


class Doubling(keras.Sequential):
    """Has `*_on_batch` methods of its own."""

    def train_on_batch(self, x, y=None, **kwargs):
        return super().train_on_batch(2 * x, y, **kwargs)

    def predict_on_batch(self, x):
        return 2 * super().predict_on_batch(x)


@quick_on_jax
@DEVICES
def test_methods_of_a_class_of_ones_own_are_its_own(devices):
    models = both(lambda: compile_(Doubling([keras.Input((4,)), layers.Dense(2)])), devices)
    x, y = data(ROWS)
    for name, batch in (("train", (x, y)), ("test", (x, y)), ("predict", (x,))):
        assert_alike(*[getattr(each, f"{name}_on_batch")(*batch) for each in models])
    assert_equal(*models)
