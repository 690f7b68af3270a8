"""One training twice: on one device by Keras alone, and on several."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

import lockstep
from tests.conformance import common
from tests.conformance.common import assert_same, weights

BATCH = 7  # divides by no number of devices
ROWS = 7 * BATCH  # and no last batch of another size, which would be another compilation
HELD_OUT = 2 * BATCH


@keras.saving.register_keras_serializable("conformance")
class Closeness(keras.metrics.Metric):
    """A metric of the user's own: the share of values that are met within a half."""

    def __init__(self, name="closeness", **kwargs):
        super().__init__(name=name, **kwargs)
        self.met = self.add_weight(shape=(), initializer="zeros", name="met")
        self.seen = self.add_weight(shape=(), initializer="zeros", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        met = keras.ops.cast(keras.ops.abs(y_true - y_pred) < 0.5, "float32")
        self.met.assign_add(keras.ops.sum(met))
        self.seen.assign_add(keras.ops.cast(keras.ops.size(met), "float32"))

    def result(self):
        return self.met / self.seen


def smooth(metrics=("mae",), dropout=0.2, **optimizer_options):
    """A compiled model without kinks, where rounding stays rounding."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    made = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dropout(dropout),
            layers.Dense(2),
        ]
    )
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9, **optimizer_options)
    made.compile(optimizer, "mse", metrics=[_metric(name) for name in metrics])
    return made


def data():
    return common.data(ROWS)


def held_out():
    return common.data(HELD_OUT, seed=9)


def getting_worse():
    """Validation data on which a model that learns the training data gets worse."""
    x, y = common.data(ROWS)
    return x[:HELD_OUT], -y[:HELD_OUT]


def train(made, callbacks=(), **kwargs):
    """`fit` on fixed data, of which no batch divides by 3 or 4; returns the history."""
    options = {
        "batch_size": BATCH,
        "epochs": 2,
        "verbose": 0,
        "shuffle": False,
        "validation_data": held_out(),
        "callbacks": list(callbacks),
    }
    return made.fit(*data(), **{**options, **kwargs}).history


@dataclass(frozen=True)
class Run:
    """What a training left behind."""

    model: Any
    folder: Path
    returned: Any


def both(script, folder, devices=4, **options):
    """Run `script(model, folder)` on one device by Keras alone, and on `devices`.

    Args:
        script: What a user would write around `fit`.
        folder: Where each run gets a folder of its own.
        devices: How many devices the second run has.
        options: For `smooth`.
    """
    runs = []
    for name, count in (("one", None), ("many", devices)):
        made = smooth(**options)
        if count is not None:
            lockstep.distribute(made, count)
        (folder / name).mkdir()
        runs.append(Run(made, folder / name, script(made, folder / name)))
    return runs


def assert_same_runs(one, many):
    """The same return value, and the same variables of model and optimizer."""
    assert_same(many.returned, one.returned)
    assert_same(weights(many.model), weights(one.model))
    assert_same(_values(many.model), _values(one.model))


def assert_same_models(one, many):
    """The same names in both folders, and in each file a model that predicts the same."""
    names = sorted(path.name for path in one.folder.iterdir())
    assert names
    assert sorted(path.name for path in many.folder.iterdir()) == names
    for name in names:
        mine, theirs = load(many.folder / name), load(one.folder / name)
        x, _ = held_out()
        assert_same(mine(x), theirs(x))
        assert_same(weights(mine), weights(theirs))
        assert_same(_values(mine), _values(theirs))


def load(path):
    """The model in a file, by plain Keras on one device."""
    if path.name.endswith(".weights.h5"):
        made = smooth()
        made.optimizer.build(made.trainable_variables)
        made.load_weights(path)
        return made
    # Keras 3.15.1 does not find a loss or metric by name again in its old format.
    return keras.models.load_model(path, compile=path.suffix != ".h5")


def outcome(call):
    """What a call gives: the value, or the error's type and text; and the warnings."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            found = call()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
    # From JAX 0.11.1 on, Keras's first build warns of the types of the data; lockstep's does not.
    texts = [str(warning.message) for warning in given]
    return found, [text for text in texts if "requested in ShapeDtypeStruct is not" not in text]


def _metric(name):
    return Closeness() if name == "closeness" else name


def _values(made):
    optimizer = getattr(made, "optimizer", None)
    variables = optimizer.variables if optimizer is not None else []
    return [np.asarray(variable.value) for variable in variables]
