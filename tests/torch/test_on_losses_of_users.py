"""Losses and metrics with code of the user's own see what they see on one device, and only once."""

import collections
import itertools
import random
import threading
import types
import warnings
from functools import partial

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

from lockstep.core.patched import patched
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel
from lockstep.keras_compat import compiled_metrics
from tests.agreement import assert_equal, both
from tests.replicas.losses_by_rows import leaves
from tests.tables import Table
from tests.tiers import every, further

LATE = 9
"""Calls after which a function changes: later than the calls of any proof or check."""


def squares(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


def contrast(y_true, y_pred):
    return squares(y_true, y_pred - ops.mean(y_pred, axis=0))


def clamped(y_true, y_pred):
    with torch.no_grad():
        y_pred[-3:].clamp_(max=0.1)
    return squares(y_true, y_pred)


def late():
    calls = []

    def function(y_true, y_pred):
        calls.append(0)
        return (contrast if len(calls) > LATE else squares)(y_true, y_pred)

    return function


def targets_written(y_true, y_pred):
    y_true[-3:] = 0.5
    return squares(y_true, y_pred)


def of_some_numbers_of_rows(y_true, y_pred):
    return squares(y_true, y_pred) * (2 if 3 <= len(y_pred) <= 5 else 1)


def noisy_by_python(y_true, y_pred):
    return squares(y_true, y_pred) * random.random()


def noisy_by_numpy(y_true, y_pred):
    return squares(y_true, y_pred) * np.random.uniform()


def noisy_by_keras(y_true, y_pred):
    return squares(y_true, y_pred) * keras.random.uniform(ops.shape(y_pred)[:1], dtype="float64")


def rare(y_true, y_pred):
    return (contrast if random.random() < 0.1 else squares)(y_true, y_pred)


def shared(kept):
    """Return a loss that reads what a metric of the whole batch has written."""

    def metric(y_true, y_pred):
        kept[0] = float(ops.max(ops.abs(ops.stop_gradient(y_pred))))
        return squares(y_true, y_pred)

    def loss(y_true, y_pred):
        return squares(y_true, y_pred) * (1 + float(kept[0]))

    return {"loss": loss, "metrics": [metric, "mae"]}


class Slots:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return self.count


def counts_in_a_namespace(space):
    def count():
        space.count += 1
        return space.count

    return count


def counts_in_itself():
    def count():
        count.calls += 1
        return count.calls

    count.calls = 0
    return count


def counts_in_a_deque(kept):
    def count():
        kept.append(0)
        return len(kept)

    return count


def times(count):
    return {"loss": lambda y_true, y_pred: squares(y_true, y_pred) * count()}


CASES = Table(
    {
        "outputs written by a loss": lambda: {"loss": clamped, "metrics": ["mae"]},
        "outputs written by a metric": lambda: {"loss": "mse", "metrics": [clamped, "mae"]},
        "targets written by a metric": lambda: {"loss": "mse", "metrics": [targets_written, "mae"]},
        "a loss that changes late": lambda: {"loss": late()},
        "a metric that changes late": lambda: {"loss": "mse", "metrics": [late()]},
        "some numbers of rows": lambda: {"loss": of_some_numbers_of_rows},
        "a rare branch": lambda: {"loss": rare},
        "noise of Keras": lambda: {"loss": noisy_by_keras},
        "noise of Python": lambda: {"loss": "mse", "metrics": [noisy_by_python]},
        "noise of NumPy": lambda: {"loss": noisy_by_numpy, "metrics": [noisy_by_numpy]},
        "a metric that a loss reads": lambda: shared([0.0]),
        "an array that a metric writes": lambda: shared(np.zeros(1)),
        "a namespace": lambda: times(counts_in_a_namespace(types.SimpleNamespace(count=0))),
        "slots": lambda: times(Slots()),
        "a deque": lambda: times(counts_in_a_deque(collections.deque(maxlen=50))),
        "an attribute of a function": lambda: times(counts_in_itself()),
        "a counter": lambda: times(partial(next, itertools.count(1))),
    }
)


@pytest.mark.parametrize("name", every(2, CASES))
def test_code_that_keeps_changes_or_writes_gives_what_one_device_gives(name):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(11, 4)), rng.normal(size=(11, 3))

    def build():
        made = keras.Sequential([keras.Input((4,)), layers.Dense(6, "tanh"), layers.Dense(3)])
        options = CASES[name]()
        made.compile(keras.optimizers.SGD(0.01, momentum=0.9), run_eagerly=False, **options)
        return made

    found = []
    for made in both(build):
        keras.utils.set_random_seed(5)
        with warnings.catch_warnings(action="ignore", category=UnsplitBatchWarning):
            found.append(leaves(made, x.copy(), y.copy()))
    assert_equal(*found)


@pytest.mark.parametrize("role", ["loss", "metrics"])
def test_what_a_function_keeps_has_the_rows_of_the_batch(role):
    kept = []

    def keeping(y_true, y_pred):
        kept.append((y_true, y_pred))
        return squares(y_true, y_pred)

    def build():
        made = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        made.compile("sgd", **{"loss": "mse", role: [keeping]})
        return made

    rng = np.random.default_rng(0)
    _, many = both(build)
    many.fit(rng.normal(size=(11, 4)), rng.normal(size=(11, 3)), batch_size=11, verbose=0)
    assert [len(each) for each in kept[-1]] == [11, 11]
    assert not any(hasattr(each, "outputs") for each in kept[-1])


def watching(owner, name, kept):
    """Let a method of an instance keep the outputs that it is given, and go on."""
    plain = getattr(owner, name)

    def watched(y_true, y_pred, sample_weight=None):
        kept.append(y_pred)
        if ops.convert_to_tensor(y_pred).device.type != "meta":  # Keras learns shapes
            kept.append(ops.convert_to_numpy(y_pred))
        return plain(y_true, y_pred, sample_weight=sample_weight)

    setattr(owner, name, watched)


def test_a_metric_that_is_watched_on_its_instance_keeps_whole_outputs():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(11, 4)), rng.normal(size=(11, 3))
    found = []

    def build():
        made = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        made.metric = keras.metrics.MeanAbsoluteError(name="mae")
        made.compile("sgd", "mse", metrics=[made.metric])
        return made

    for made in both(build):
        kept = []
        watching(made.metric, "update_state", kept)
        for rows in (slice(0, 7), slice(7, 11)):
            made.train_on_batch(x[rows], y[rows])
        found.append([ops.convert_to_numpy(each * 1.0) for each in kept[-4:]])
    assert_equal(*found)


def test_an_output_that_was_not_gathered_is_an_error_after_its_step():
    kept = []
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(11, 4)), rng.normal(size=(11, 3))

    def build():
        made = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        made.compile("sgd", "mse", metrics=["mae"])
        return made

    _, many = both(build)
    many.train_on_batch(x, y)
    metrics = compiled_metrics(many)
    with patched([(metrics, "update_state", lambda y, p, sample_weight=None: kept.append(p))]):
        many.train_on_batch(x, y)
    assert len(kept[0]) == 11
    with pytest.raises(UnsupportedModel, match="is used after its step has ended"):
        kept[0] + 1.0
    many.train_on_batch(x, y)  # the processes are there still


def test_a_loss_reads_the_array_that_the_data_change():
    """No callback is there, so that nothing else makes the processes compare the model."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(11, 4)), rng.normal(size=(11, 3))

    class Data(keras.utils.PyDataset):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def __len__(self):
            return 4

        def __getitem__(self, number):
            self.factor[0] = 1 + number
            return x, y

    def build():
        factor = np.ones(1)

        def loss(y_true, y_pred):
            return squares(y_true, y_pred) * float(factor[0])

        made = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        made.compile(keras.optimizers.SGD(0.01), loss)
        made.factor = factor
        return made

    found = []
    for made in both(build):
        with warnings.catch_warnings(action="ignore", category=UnsplitBatchWarning):
            history = made.fit(Data(made.factor), epochs=2, shuffle=False, verbose=0).history
        found.append([history, made.get_weights()])
    assert_equal(*found)


class Weighted(keras.losses.Loss):
    """A squared error, weighted by the running error of the epoch."""

    def __init__(self, metric):
        super().__init__()
        self.metric = metric

    def call(self, y_true, y_pred):
        return ops.square(y_true - y_pred) * (1 + self.metric.result())


class ReadsMetrics(keras.Model):
    """A `compute_loss` that reads the metrics of `compile`, or one of its own."""

    def __init__(self, own):
        super().__init__()
        self.dense = layers.Dense(1)
        self.running = keras.metrics.MeanAbsoluteError(name="running") if own else None

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        read = self.running.result() if self.running else self.get_metrics_result().get("mae", 0)
        return ops.mean(ops.square(y - y_pred)) * (1 + read)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        if self.running:
            self.running.update_state(y, y_pred)
        return super().compute_metrics(x, y, y_pred, sample_weight)


def _weighted():
    made = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    metric = keras.metrics.MeanAbsoluteError(name="running")
    made.compile("adam", Weighted(metric), metrics=[metric])
    return made


def _reading(own, **compiled):
    made = ReadsMetrics(own)
    made.compile("adam", metrics=["mae"], **compiled)
    return made


@pytest.mark.parametrize(
    "build",
    [_weighted, partial(_reading, True, loss="mse"), *further(partial(_reading, False))],
    ids=["loss", "own", "compiled"],
)
def test_a_loss_that_reads_a_metric_reads_the_values_of_one_device(build):
    """Every process computes metrics. At first they are zero, and all is equal."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(22, 6)), rng.normal(size=(22, 1))
    one, many = both(build)
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UnsplitBatchWarning)
        found = [made.fit(x, y, **options).history for made in (one, many)]
    assert_equal(*found)
    assert_equal(one, many)
    assert not [each for each in said if "only the first device runs" in str(each.message)]


class Guarded(keras.metrics.Mean):
    """A metric that cannot be pickled."""

    def __init__(self):
        super().__init__(name="guarded")
        self.lock = threading.Lock()

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(ops.max(y_pred, axis=-1))


def test_a_metric_that_cannot_be_pickled_stays_in_the_first_process(monkeypatch):
    """With a first step that is compared, the first process would run all of it alone."""
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(22, 4)), rng.normal(size=(22, 3))

    def build():
        made = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        made.compile("sgd", "mse", metrics=[Guarded(), "mae"])
        return made

    one, many = both(build)
    options = {"batch_size": 8, "verbose": 0}
    found = []
    for made in (one, many):
        logs = made.fit(x, y, epochs=2, shuffle=False, **options).history
        found.append([logs, made.evaluate(x, y, return_dict=True, **options)])
    assert_equal(*found)
    assert_equal(one, many)
