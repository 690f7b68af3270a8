"""Faults that the check of the first step has to find, on an engine with replicas.

Each proof is forced to say that all code works row by row. The check has to see that it does not,
before the first update: after one step, several devices have the weights of one.
"""

import contextvars
import decimal
import functools
import hashlib
import io
import itertools
import logging
import os
import queue
import random
import socket
import threading
import types
import warnings
import weakref
from array import array
from collections import Counter, UserDict, deque
from contextlib import ExitStack, suppress
from unittest import mock

import keras
import numpy as np
import pandas
import pytest
import scipy.sparse
from keras import layers, ops

import lockstep
from lockstep.engines.replicas.first_step import rows_to_check
from lockstep.engines.replicas.object_states import ObjectStates
from lockstep.engines.replicas.sketches import bounds_for
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel
from tests.conformance.zoo import ZOO
from tests.precision import floats
from tests.tables import Table
from tests.tiers import every

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")

DEVICES = 3
ROWS = 23
PLACE = "lockstep.engines.replicas.first_step"


class Does(layers.Layer):
    """Does what it is told."""

    def __init__(self, what, **kwargs):
        super().__init__(**kwargs)
        self.what = what

    def build(self, shape):
        self.seen = self.add_weight(shape=(5,), initializer="zeros", trainable=False, name="seen")
        self.kernel = self.add_weight(shape=(5, 5), name="kernel")

    def call(self, x, training=False):
        return self.what(self, x, training)

    def compute_output_spec(self, x, training=False):
        return keras.KerasTensor(x.shape, x.dtype)


def _mean(x):
    return ops.mean(x, axis=0, keepdims=True)


def _remembers(layer, x, training):
    layer.seen.assign(0.5 * layer.seen + 0.5 * ops.mean(x, axis=0))
    return x


def _mean_of_gradients(layer, x, training):
    """Return the input, with a gradient that mixes the rows."""
    mixed = _mean(x * x)
    return x + mixed - ops.stop_gradient(mixed)


def _noise(layer, x, training):
    noise = keras.random.normal(ops.shape(x), seed=layer.seeds)
    return x + noise - _mean(noise * x)


LAYERS = Table(
    {
        "mean of the batch": lambda layer, x, training: x - _mean(x),
        "maximum of the batch": lambda layer, x, training: x / (1 + ops.max(ops.abs(x), axis=0)),
        "softmax over the rows": lambda layer, x, training: ops.softmax(x, axis=0),
        "running sum": lambda layer, x, training: ops.cumsum(x, axis=0) / 9,
        "rows in reverse": lambda layer, x, training: x + ops.flip(x, axis=0),
        "rows rolled": lambda layer, x, training: ops.roll(x, 1, axis=0) + x,
        "sorted columns": lambda layer, x, training: ops.sort(x, axis=0),
        "similarity of rows": lambda layer, x, training: ops.matmul(
            ops.softmax(ops.matmul(x, ops.transpose(x)), axis=-1), x
        ),
        "the first row": lambda layer, x, training: x + x[:1],
        "the last row": lambda layer, x, training: x * x[-1:],
        "number of rows": lambda layer, x, training: x * 7 / ops.cast(ops.shape(x)[0], x.dtype),
        "deviation": lambda layer, x, training: x / (1 + ops.std(x, axis=0)),
        "mean in training": lambda layer, x, training: x - _mean(x) if training else x,
        "mean in prediction": lambda layer, x, training: x if training else x - _mean(x),
        "mean of one column": lambda layer, x, training: ops.concatenate(
            [x[:, :4], x[:, 4:] - _mean(x[:, 4:])], axis=1
        ),
        "mean times a weight": lambda layer, x, training: (
            x + 0.01 * ops.matmul(_mean(x), layer.kernel)
        ),
        "gradient of the mean": _mean_of_gradients,
        "an average that is kept": _remembers,
        "noise of all rows": _noise,
    }
)
"""What a layer does with its rows that depends on other rows."""


def contrast(y_true, y_pred):
    """Return a value for each row that depends on all rows."""
    y_true = ops.convert_to_tensor(y_true)  # Keras gives a metric on PyTorch a NumPy array
    return ops.mean(ops.square(y_true - y_pred + _mean(y_pred)), axis=-1)


def model_of(what=None, loss="mse", metrics=None, kind=keras.Model):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    hidden = layers.Dense(5, activation="tanh")(inputs)
    if what is not None:
        layer = Does(what, name="faulty")
        layer.seeds = keras.random.SeedGenerator(4)
        hidden = layer(hidden)
    made = kind(inputs, layers.Dense(2)(hidden))
    made.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=metrics)
    return made


def data():
    numbers = np.random.default_rng(1)
    return numbers.normal(size=(ROWS, 6)), numbers.normal(size=(ROWS, 2))


def everything_proven():
    """Force the proofs to take any code for one that works row by row."""
    stack = ExitStack()
    for place, verdict in PLACES_OF_PROOFS[keras.backend.backend()].items():
        stack.enter_context(mock.patch(f"lockstep.engines.{place}", lambda *a, v=verdict, **k: v))
    return stack


PLACES_OF_PROOFS = Table(
    {
        "torch": {
            "torch.first_step.row_proofs.refused": {},
            "torch.steps.whole_batch_steps._refused": None,
        },
        "tensorflow": {
            "tensorflow.steps.steps.refused": {},
            "tensorflow.steps.custom_steps.call_refused": None,
            "tensorflow.steps.loss_sharding.why_whole": None,
        },
    }
)


def two_steps(made, x, y):
    logs = [made.train_on_batch(x[:17], y[:17], return_dict=True)]
    logs.append(made.train_on_batch(x[17:], y[17:], return_dict=True))
    return logs, made.predict(x, batch_size=9, verbose=0), made.get_weights()


def assert_found(build, name=None):
    """Several devices give what one gives, and a warning has this name in it; its words."""
    x, y = data()
    expected = two_steps(build(), x, y)
    with everything_proven(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnsplitBatchWarning)
        mine = two_steps(lockstep.distribute(build(), DEVICES), x, y)
    said = [str(each.message) for each in caught if each.category is UnsplitBatchWarning]
    assert name is None or any(name in each and " differs by " in each for each in said), said
    for a, b in zip(keras.tree.flatten(mine), keras.tree.flatten(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)
    return said


@pytest.mark.parametrize("fault", every(6, LAYERS, quick=1))
def test_a_layer_that_is_wrongly_proven_is_found_before_the_first_update(fault):
    # A layer whose outputs are right is not named, but a gradient.
    name = "the gradient of" if fault == "gradient of the mean" else "faulty"
    assert_found(lambda: model_of(LAYERS[fault]), name)


def _scaled(layer, x, training):
    return (x - _mean(x)) * next(layer.numbers)


def test_a_model_with_an_iterator_runs_alone():
    def build():
        made = model_of(_scaled)
        made.run_eagerly = keras.backend.backend() == "tensorflow"  # else a number is a constant
        made.get_layer("faulty").numbers = itertools.cycle([1.0, 0.5, 2.0, 0.7, 1.3])
        return made

    said = assert_found(build)
    # TensorFlow runs an eager step on the first device in any case.
    assert any("cannot be run and compared" in each or "eager" in each for each in said), said


@pytest.mark.parametrize("moves", ["outputs", "gradients"])
def test_a_step_that_one_device_does_not_repeat_runs_alone_and_says_so(moves, tmp_path):
    """It counts its calls in a file, and no run sets that back.

    Its gradients differ for the first rows that are tried alone, as those of a kink do.
    """
    calls = tmp_path / "calls"

    def counted(layer, x, training):
        with calls.open("a") as file:
            print(end="x", file=file)
        count = calls.stat().st_size
        if moves == "outputs":
            return x * (1.0 + count)
        kernel = layer.kernel[0]
        return x + (kernel - ops.stop_gradient(kernel)) * max(4.0 - count, 1.0)

    x, y = data()
    with everything_proven(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnsplitBatchWarning)
        model = lockstep.distribute(model_of(counted), DEVICES)
        calls.write_text("")
        model.train_on_batch(x, y)
    said = [str(each.message) for each in caught if each.category is UnsplitBatchWarning]
    what = "faulty" if moves == "outputs" else "the gradient of"
    assert any("different results in two runs" in each and what in each for each in said), said
    assert any("Draw random numbers with keras.random" in each for each in said), said
    assert not any("exact" in each for each in said), said
    lockstep.release(model)


class Pair(layers.Layer):
    """Has layers in a tuple."""

    def __init__(self):
        super().__init__()
        self.pair = layers.Dense(4), layers.Dense(5)

    def call(self, x):
        return self.pair[1](self.pair[0](x))


def test_a_layer_with_layers_in_a_tuple_trains():
    def build():
        keras.utils.set_random_seed(3)
        made = keras.Sequential([keras.Input((6,)), Pair(), layers.Dense(2)])
        made.compile("sgd", "mse")
        return made

    assert assert_found(build) == []


class Steps:
    """An iterator in Python, whose state is in its attributes."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return self.number


def _of_thread():
    made = threading.local()
    made.number = 0
    return made


def _times(owner):
    owner.number = getattr(owner, "number", 0) + 1
    return owner.number


def _counted(numbers):
    numbers[Steps] = numbers.get(Steps, 0) + 1
    return numbers[Steps]


def _line(file):
    return file.readline()


class Called:
    """Its methods of two underscores read a global and a closure, and an empty slot counts."""

    __slots__ = ("number",)

    def __call__(self):
        return next(NUMBERS), _times(self)


def _late():
    last = None

    def call():
        nonlocal last
        last = 1 if last is None else last + 1
        return last

    return call


def _new_global():
    globals()["MADE"] = globals().get("MADE", 0) + 1  # and by its name, which the code has
    return MADE  # noqa: F821


def _global_by_text():
    globals()["BY_TEXT"] = globals().get("BY_TEXT", 0) + 1
    return globals()["BY_TEXT"]


def _function_that_counts():
    def call():
        return _times(call)

    return call


def _class_that_counts():
    return type("Counts", (), {"__call__": lambda self: _times(type(self))})()


def _environ():
    os.environ["LOCKSTEP_TEST_STEPS"] = str(int(os.environ.get("LOCKSTEP_TEST_STEPS", "0")) + 1)
    return os.environ["LOCKSTEP_TEST_STEPS"]


def _decimals():
    decimal.getcontext().prec += 1
    return decimal.getcontext().prec


def _matrix(matrix):
    matrix.data[0] += 1
    return matrix.sum()


def _frame(frame):
    frame.loc[0, "n"] += 1
    return frame.loc[0, "n"]


def _level(logger):
    logger.setLevel(logger.level + 1)
    return logger.level


def _digits(context):
    context.prec += 1
    return context.prec


PUT_BACK = Table(
    {
        "the level of a logger": (lambda: logging.getLogger("tests.of.lockstep"), _level),
        "a context of decimals": (lambda: decimal.Context(prec=5), _digits),
        "an environment variable": (lambda: _environ, lambda call: call()),
        "the context of decimals": (lambda: _decimals, lambda call: call()),
        "a matrix of SciPy": (lambda: scipy.sparse.csr_matrix(np.eye(2)), _matrix),
        "a table of pandas": (lambda: pandas.DataFrame({"n": [0.0]}), _frame),
        "a method of two underscores": (Called, lambda c: c()),
        "a method of a base class": (lambda: type("Below", (Called,), {})(), lambda c: c()),
        "a closure's None": (_late, lambda call: call()),
        "a new global": (lambda: _new_global, lambda call: call()),
        "a global that text names": (lambda: _global_by_text, lambda call: call()),
        "a new attribute of a function": (_function_that_counts, lambda call: call()),
        "a new attribute of a class": (_class_that_counts, lambda call: call()),
        "a large array": (lambda: np.zeros(70_000), lambda a: a.__iadd__(1).sum()),
        "an array of objects": (lambda: np.array([1, "s"], object), lambda a: a.__iadd__(a)[0]),
        "what was spawned": (lambda: np.random.SeedSequence(1), lambda s: s.spawn(1)[0].spawn_key),
        "what a generator spawned": (
            lambda: np.random.default_rng(1),
            lambda r: r.spawn(1)[0].random(),
        ),
        "a list": (lambda: [1, 2], list.pop),
        "a deque": (lambda: deque([1, 2]), deque.popleft),
        "a counter": (Counter, lambda c: c.update("a") or c["a"]),
        "a user's dict": (lambda: UserDict(a=1), lambda d: d.update(a=d["a"] + 1) or d["a"]),
        "bytes": (lambda: bytearray(b"ab"), bytearray.pop),
        "an array": (lambda: array("d", [1, 2]), array.pop),
        "an array of NumPy": (lambda: np.zeros(2), lambda a: a.__iadd__(1).sum()),
        "text": (lambda: io.StringIO("a\nb\n"), _line),
        "random numbers": (lambda: random.Random(1), random.Random.random),
        "NumPy's": (lambda: np.random.default_rng(1), lambda r: r.random()),
        "NumPy's old ones": (lambda: np.random.RandomState(1), lambda r: r.rand()),
        "NumPy's bits": (lambda: np.random.PCG64(1), lambda r: r.random_raw()),
        "an iterator in Python": (Steps, next),
        "a bound method": (lambda: deque([1, 2]).popleft, lambda call: call()),
        "a partial": (lambda: functools.partial(next, Steps()), lambda call: call()),
        "options": (types.SimpleNamespace, _times),
        "options of a thread": (_of_thread, _times),
        "a lock": (threading.Lock, lambda lock: lock.acquire(blocking=False)),
        "weak keys": (weakref.WeakKeyDictionary, _counted),
        "an exit stack": (
            ExitStack,
            lambda s: s.callback(print) and len(vars(s)["_exit_callbacks"]),
        ),
        "the state of a proxy": (lambda: weakref.proxy(NUMBERS), next),
    }
)
"""Objects that are put back: how to make one, and a use that gives another value each time."""

NUMBERS = Steps()

FIXED = Table(
    {
        "itertools.cycle": lambda: itertools.cycle([1]),
        "itertools.count": itertools.count,
        "list_iterator": lambda: iter([1]),
        "map": lambda: map(abs, [1]),
        "zip": lambda: zip([1], strict=True),
        "generator": lambda: (number for number in [1]),
        "numpy.flatiter": lambda: np.ones(3).flat,
        f"numpy.ndarray with {2**28 + 1} bytes": lambda: np.empty(2**28 + 1, "int8"),
        "_io.TextIOWrapper": lambda: open(__file__),  # noqa: SIM115
        "socket.socket": socket.socket,
        "_thread.lock": lambda: _held(threading.Lock()),
        "_thread.RLock": lambda: _held(threading.RLock()),
        "threading.Event": threading.Event,
        "queue.Queue": queue.Queue,
        "random.SystemRandom": random.SystemRandom,
        "_queue.SimpleQueue": queue.SimpleQueue,
        "_hashlib.HASH": hashlib.md5,
        "_contextvars.ContextVar": lambda: contextvars.ContextVar("a"),
    }
)
"""Objects that cannot be put back, by their classes."""


def _held(lock):
    lock.acquire()
    return lock


@pytest.mark.parametrize("kind", PUT_BACK)
def test_an_object_that_a_tried_step_uses_is_as_before(kind):
    make, use = PUT_BACK[kind]
    owner = types.SimpleNamespace(held=make())
    states = ObjectStates([owner])
    assert not states.fixed
    first = use(owner.held)
    states.put_back()
    assert use(owner.held) == first
    assert use(owner.held) != first  # so the use has changed something


@pytest.mark.parametrize("kind", FIXED)
def test_nothing_is_tried_with_an_object_that_cannot_be_put_back(kind):
    held = FIXED[kind]()
    assert ObjectStates([types.SimpleNamespace(held=[held])]).fixed == kind
    with suppress(AttributeError):
        held.close()


def test_an_empty_cache_is_empty_again_and_draws_what_it_drew():
    draw = functools.lru_cache(random.random)
    states, before = ObjectStates([draw]), random.getstate()
    first = draw()
    states.put_back()
    random.setstate(before)
    assert draw() == first
    assert random.getstate() != before  # it was called again


def test_a_loss_that_is_declared_wrongly_is_an_error():
    def declared(y_true, y_pred):
        return contrast(y_true, y_pred)

    made = lockstep.distribute(model_of(loss=lockstep.rowwise(declared)), DEVICES)
    before = made.get_weights()
    with pytest.raises(UnsupportedModel, match="is declared row-wise"):
        made.train_on_batch(*data())
    for a, b in zip(made.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


class Own(keras.Model):
    """A model with steps of its own."""

    def test_step(self, data):
        x, y = data
        loss = self.compute_loss(x, y, self(x, training=False))
        return {"loss": loss}

    def train_step(self, data):
        return super().train_step(data)


def test_a_layer_in_a_step_of_the_users_own_is_found():
    x, y = data()
    made = model_of(LAYERS["mean of the batch"], kind=Own)
    lockstep.rowwise(made.get_layer("faulty"))
    lockstep.distribute(made, DEVICES)
    with pytest.raises(UnsupportedModel, match="'faulty' is declared row-wise, but on several"):
        made.fit(x, y, batch_size=8, verbose=0)


def test_a_declaration_that_is_wrong_is_an_error():
    x, y = data()
    made = model_of(LAYERS["mean of the batch"])
    lockstep.rowwise(made.get_layer("faulty"))
    before = made.get_weights()
    lockstep.distribute(made, DEVICES)
    with pytest.raises(UnsupportedModel, match="'faulty' is declared row-wise, but on several"):
        made.train_on_batch(x, y)
    for a, b in zip(made.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_the_check_the_same_fault_is_not_found(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")
    x, y = data()
    expected = two_steps(model_of(LAYERS["mean of the batch"]), x, y)
    with everything_proven():
        mine = two_steps(lockstep.distribute(model_of(LAYERS["mean of the batch"]), DEVICES), x, y)
    assert np.max(np.abs(mine[1] - expected[1])) > 1e-3


def test_a_checked_step_leaves_no_trace():
    """Attributes, counters and random numbers are those of steps that were not checked."""

    def counted(layer, x, training):
        layer.calls.append(len(layer.calls))
        return x * 2

    def run(devices):
        made = model_of(counted)
        made.get_layer("faulty").calls = []
        if devices:
            lockstep.distribute(made, devices)
        np.random.seed(8)
        x, y = data()
        with warnings.catch_warnings(action="ignore", category=UnsplitBatchWarning):
            made.train_on_batch(x, y)
        return made, list(made.get_layer("faulty").calls), np.random.uniform()

    one, several = run(0), run(DEVICES)
    assert several[2] == one[2]
    if keras.backend.backend() == "torch":  # on TensorFlow, traces call the layer
        assert several[1] == one[1]
    assert int(several[0].optimizer.iterations.numpy()) == 1


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
def test_a_batch_norm_that_no_layer_holds_has_its_moving_averages_once():
    def build():
        norm = layers.BatchNormalization()
        norm.build((None, 5))
        return model_of(lambda layer, x, training: norm(x, training=training))

    x, y = data()
    expected = two_steps(build(), x, y)
    mine = two_steps(lockstep.distribute(build(), DEVICES), x, y)
    for a, b in zip(keras.tree.flatten(mine), keras.tree.flatten(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


def test_float32_within_a_model_of_float64_is_no_difference():
    made = model_of()
    with floats("float64"):
        assert bounds_for(made, {"float64"}).value < 1e-8
        place = "lockstep.engines.replicas.sketches.computes_in_float64"
        with mock.patch(place, return_value=False):
            assert bounds_for(made, {"float64"}).value > 1e-5


def test_the_first_step_of_a_model_of_keras_alone_is_not_compared():
    x, y = data()
    with mock.patch(f"{PLACE}.rows_to_check") as compared:
        made = lockstep.distribute(model_of(), DEVICES)
        made.train_on_batch(x, y)
        made.fit(x, y, batch_size=6, epochs=2, verbose=0)
        made.predict(x, verbose=0)
    assert not compared.called


@pytest.mark.thorough
@pytest.mark.each_value_once
@pytest.mark.parametrize("policy", ["float32", "float64", "mixed_bfloat16"])
@pytest.mark.parametrize("name", every(7, ZOO))
def test_no_model_of_the_zoo_alarms(name, policy):
    case = ZOO[name]
    with floats("float64" if policy == "float64" else "float32", policy):
        keras.utils.set_random_seed(2)
        made = case.build(case.dropout)
        made.compile(keras.optimizers.SGD(0.01), case.loss, metrics=case.metrics)
        x, y = case.data(24, np.random.default_rng(5))
        lockstep.distribute(made, DEVICES)
        with (
            mock.patch(f"{PLACE}.is_guessed", return_value=True),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            made.fit(x, y, batch_size=12, verbose=0)
            made.predict(x, verbose=0)
    assert not [each for each in caught if " differs by " in str(each.message)], caught


def test_some_rows_are_checked_from_the_start_and_as_many_after_them():
    def checked(rows):
        return [(part.start, part.stop) for part in rows_to_check(model_of(), rows, replicas=2)]

    assert checked(5) == [(0, 5)]
    assert checked(8) == [(0, 5), (3, 8)]
    assert checked(100) == [(0, 5), (5, 10)]
