"""One training by third-party code, on one device by stock Keras and on several by lockstep."""

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import keras
import numpy as np

import lockstep
from lockstep.attach.attachment import attachment_of
from lockstep.errors import UnsplitBatchWarning
from tests.conformance.stock import every_loss_counted
from tests.precision import floats as precision_of_keras

BACKEND = keras.backend.backend()
PROCESSES = int(os.environ.get("LOCKSTEP_PROCESSES", "1"))
DEVICES = {"jax": 4, "tensorflow": 2, "torch": 3}[BACKEND] if PROCESSES == 1 else 1
"""The devices of this process."""
BOUNDS = {"float64": 1e-10, "float32": 1e-5}
DROPOUT = 0.0 if BACKEND == "torch" else 0.1
"""Replicas on PyTorch draw dropout masks of their own; docs/pytorch.md."""
ALONE = "only the first device runs every batch"

_OF_OTHERS = (
    "`shuffle=True` was passed",  # KerasHub: `fit` of arrays, which it makes a tf.data.Dataset
    "Skipping variable loading for optimizer",  # KerasTuner: the best model has not trained yet
)
"""User warnings that the libraries give without lockstep, too."""


@dataclass(frozen=True)
class Row:
    """A row of the table in docs/third-party.md.

    Attributes:
        train: Makes, distributes and trains models. It is given a function to call on each
            model where a user calls `lockstep.distribute`, and returns a tree of other values
            to compare: logs, predictions, texts.
        float32: Why the row cannot be computed in float64 throughout; empty if it can.
        unsplit: By backend, a part of the warning that not all work is split.
    """

    train: Callable
    float32: str = ""
    unsplit: Mapping[str, str] = field(default_factory=dict)

    @property
    def precision(self):
        return "float32" if self.float32 else "float64"


@dataclass(frozen=True)
class Result:
    """What one row gave: the largest difference by kind of value, and what lockstep warned."""

    weights: float
    rest: float
    warned: list[str]


def compare(row):
    """Train on one device and on several; the largest differences of what both leave."""
    with floats(row.precision):
        one, warned = _play(row, None)
        assert not warned, f"without lockstep: {warned}"
        many, warned = _play(row, lockstep.distribute)
    assert one.keys() == many.keys()
    far = {name: _difference(one[name], many[name]) for name in one}
    weights = [gap for name, gap in far.items() if name.startswith("weights/")]
    rest = [gap for name, gap in far.items() if not name.startswith("weights/")]
    assert weights, "no weights were compared"
    return Result(max(weights), max(rest), warned)


def numbers(*shape, seed=0):
    """Normally distributed numbers in the precision of the row."""
    return np.random.default_rng(seed).normal(size=shape).astype(keras.config.floatx())


def digits(rows=42, size=16, channels=3):
    """Handwritten digits of scikit-learn, enlarged, and their classes."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images[:rows].reshape(-1, 8, 8, 1) / 16.0
    images = images.repeat(size // 8, 1).repeat(size // 8, 2).repeat(channels, 3)
    return images.astype(keras.config.floatx()), labels[:rows].astype("int32")


@contextmanager
def floats(precision):
    """Keras computes in this precision."""
    double = precision == "float64" and BACKEND != "tensorflow"
    with precision_of_keras(precision), _double_precision(double):
        yield


@contextmanager
def _double_precision(wanted):
    if not wanted:
        yield
        return
    from keras.src.backend.common import dtypes

    # keras/src/backend/common/dtypes.py: means, normalisations and losses would round to float32.
    stock = dtypes.BIT64_TO_BIT32_DTYPE["float64"]
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    try:
        with _x64_on_jax():
            yield
    finally:
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = stock


@contextmanager
def _x64_on_jax():
    if BACKEND != "jax":
        yield
        return
    import jax

    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def _play(row, distribute):
    keras.utils.clear_session()
    keras.utils.set_random_seed(11)
    models = []

    def attach(model):
        models.append(model)
        if distribute is not None:
            distribute(model, devices=DEVICES if PROCESSES == 1 else None)
        return model

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)  # between the libraries themselves
        for message in _OF_OTHERS:
            warnings.filterwarnings("ignore", message)
        warnings.simplefilter("always", UnsplitBatchWarning)
        if distribute is None:
            with every_loss_counted():
                left = row.train(attach)
        else:
            left = row.train(attach)
    assert models, "no model was distributed"
    if distribute is not None:
        placed = set().union(*map(_copies, models))
        alone = BACKEND == "torch" and any(ALONE in str(warning.message) for warning in caught)
        assert placed == {DEVICES} or (alone and not placed), f"variables are on {placed} devices"
    found = _by_name(models, left)
    for model in models:  # the processes of PyTorch end, and the next row may be in float32
        lockstep.release(model)
    return found, [str(warning.message) for warning in caught]


def _copies(model):
    """On how many devices the variables of a model are."""
    if PROCESSES > 1:
        return {DEVICES}
    if BACKEND == "torch":  # each process of the pool holds the model after its first step
        pool = attachment_of(model).session._peers._lease._pool
        return set() if pool is None else {pool.group.size}
    values = [variable.value for variable in model.trainable_variables]
    return {len(value.devices() if BACKEND == "jax" else value.values) for value in values}


def _by_name(models, left):
    found = {
        "/".join(map(str, ("left", *path))): np.asarray(leaf)
        for path, leaf in keras.tree.flatten_with_path(left)
    }
    for number, model in enumerate(models):
        slots = model.optimizer.variables if model.optimizer is not None else []
        for part, variables in (("weights", model.variables), ("optimizer", slots)):
            for place, variable in enumerate(variables):
                value = keras.ops.convert_to_numpy(variable.value)
                found[f"{part}/{number}/{place}/{variable.path}"] = value
    return found


def _difference(one, many):
    assert (one.shape, one.dtype) == (many.shape, many.dtype)
    if one.dtype.kind != "f":
        return 0.0 if np.array_equal(one, many) else float("inf")
    assert np.all(np.isfinite(one)), "one device gives a number that is not finite"
    return float(np.max(np.abs(one.astype("float64") - many.astype("float64")), initial=0.0))
