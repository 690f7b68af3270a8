"""A small model with everything that notices a wrong row, and its data."""

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.errors import BusyModel

ROWS = 53  # seven batches of 7, and one of 4


def model(compiled=True, seed=5, built=True):
    keras.utils.set_random_seed(seed)
    made = keras.Sequential([keras.Input((4,))] if built else [])
    for layer in (
        layers.Dense(6, activation="relu"),
        layers.BatchNormalization(),
        layers.Dropout(0.2),
        layers.Dense(2),
    ):
        made.add(layer)
    if compiled:
        compile_(made)
    return made


def compile_(made):
    made.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])


def data(rows=ROWS, seed=2):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 4)).astype("float32"), rng.normal(size=(rows, 2)).astype(
        "float32"
    )


def fit(made, **kwargs):
    return made.fit(*data(), **{"batch_size": 7, "verbose": 0, "shuffle": False, **kwargs}).history


def weights(made):
    return [np.asarray(v.value) for v in made.weights]


def assert_same(mine, theirs, atol=1e-5):
    mine, theirs = keras.tree.flatten(mine), keras.tree.flatten(theirs)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=atol)


def assert_compile_is_refused_in(hook):
    """Assert that `compile` in a hook of a running `fit` ends in words, and spoils nothing."""
    made = lockstep.distribute(model(), 2)
    callback = keras.callbacks.Callback()
    setattr(callback, hook, lambda *_, **__: made.compile("sgd", "mae"))
    with pytest.raises(BusyModel, match=r"_function while it is .* callback called compile") as no:
        fit(made, validation_data=data(9), callbacks=[callback])
    assert str(no.value).count("\n") < 3
    fit(made)


def snapshot(model):
    """Every variable of the model and its optimizer, by path."""
    named = [(v.path, v) for v in model.variables]
    named += [(f"optimizer/{v.path}", v) for v in model.optimizer.variables]
    return {path: np.asarray(variable.value) for path, variable in named}


def distances(a, b):
    """The largest absolute difference of each variable of two snapshots."""
    assert a.keys() == b.keys()
    return {path: float(np.max(np.abs(a[path] - b[path]), initial=0.0)) for path in a}


def devices_of(made):
    """How many devices each variable is on."""
    return {len(v.value.devices()) for v in made.variables}
