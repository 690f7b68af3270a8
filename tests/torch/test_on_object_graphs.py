"""What changes the bytes of a model is seen without pickling it, or nothing is said of it."""

import collections
import copyreg
import fractions
import functools
import itertools
import sys
import types

import keras
import numpy as np
import pytest
import torch
from keras import layers

import lockstep
from lockstep.engines.torch.ranks import step_runner
from lockstep.engines.torch.same_model.model_pickle import dump
from tests.tables import Table

SCRIPT = """
import functools
import keras

SCALE = 1.0
TABLE = {"a": [1.0, {"b": 2.0}]}

def factor():
    inner = [3.0]
    def mine(y_true, y_pred, power=2, *, weight=1.0):
        if "LATER" in globals():
            weight = LATER
        return SCALE * weight * TABLE["a"][0] * inner[0] * keras.ops.mean(
            keras.ops.abs(y_true - y_pred) ** power, axis=-1
        )
    return mine

mine = factor()

class Options:
    level = 1

class Named(keras.layers.Dense):
    kind = "named"
"""
"""The user's own, which travels by value."""


def script():
    made = {"__name__": "__main__"}
    exec(compile(SCRIPT, "script.py", "exec"), made)
    return made


class Case:
    """A model of Keras's layers with a loss of a script."""

    def __init__(self, kind=None):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        self.script = script()
        inputs = keras.Input((4, 1))
        x = layers.Conv1D(3, 2, kernel_regularizer="l2", name="conv")(inputs)
        x = layers.BatchNormalization(name="norm")(x)
        x = layers.Dropout(0.5, seed=1, name="dropout")(x)
        x = layers.Flatten(name="flatten")(x)
        dense = layers.Dense if kind is None else self.script[kind]
        self.model = keras.Model(inputs, dense(2, activation="relu", name="dense")(x))
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
        optimizer = keras.optimizers.Adam(rate, clipnorm=1.0)
        self.model.compile(optimizer, self.script["mine"], metrics=["mae"])
        self.run_steps()
        self.layer = self.model.get_layer
        self.dense, self.optimizer = self.layer("dense"), optimizer

    def run_steps(self):
        for run in (self.model.test_on_batch, self.model.train_on_batch):
            run(np.ones((2, 4, 1)), np.zeros((2, 2)))


def sees(case, change):
    """Return whether the bytes are others after a change, and whether that was seen."""
    before = dump(case.model, with_graph=True)
    change(case)
    is_still = before.is_still()
    try:
        after = dump(case.model)
    except Exception:
        return True, not is_still
    alike = all(a is b for a, b in itertools.zip_longest(before.tensors, after.tensors))
    return before.data != after.data or not alike, not is_still


def setting(*path, value):
    def change(case):
        owner = functools.reduce(getattr, path[:-1], case)
        setattr(owner, path[-1], value)

    return change


def put(name, value):
    def change(case):
        case.script[name] = value

    return change


def run(text):
    def change(case):
        exec(text, {"case": case, "torch": torch, "np": np, "keras": keras, **vars(case)})

    return change


CHANGES = Table(
    {
        "an attribute": setting("dense", "units", value=7),
        "an equal number": setting("dense", "extra", value=1e300),
        "a new attribute": setting("dense", "mine", value=[1]),
        "an attribute is gone": run("del vars(dense)['activity_regularizer']"),
        "the name of an attribute": run("d = vars(dense); d['renamed'] = d.pop(list(d)[-1])"),
        "a key of a global": run("t = script['TABLE']; t['b'] = t.pop('a')"),
        "a regularizer": run("layer('conv').kernel_regularizer.l2 = 0.5"),
        "a regularizer is another": run(
            "layer('conv').kernel_regularizer = keras.regularizers.L1()"
        ),
        "an initializer": run("dense.kernel_initializer.scale = 3.0"),
        "an activation": run("dense.activation = keras.activations.tanh"),
        "a seed": run("vars(layer('dropout').seed_generator)['_initial_seed'] = 9"),
        "the rate of a dropout": run("layer('dropout').rate = 0.1"),
        "the spec of inputs": run("dense.input_spec.axes = {-1: 8}"),
        "an item of a spec": run("dense.input_spec.axes[0] = 1"),
        "a policy": run("dense.dtype_policy = keras.DTypePolicy('mixed_bfloat16')"),
        "trainable": run("dense.trainable = False"),
        "a tracked list": run("dense._layers.append(1)"),
        "a list of variables": run("dense._trainable_variables.reverse()"),
        "a hook of PyTorch": run("dense.register_forward_hook(print)"),
        "the order of hooks": run("h = dense._forward_hooks; h[1] = print; h[2] = len; case.h = h"),
        "the optimizer": run("optimizer.beta_1 = 0.5"),
        "an item of the optimizer": run(
            "d = [v for v in vars(optimizer).values() if isinstance(v, dict) and v][0]\n"
            "k = next(iter(d)); d[k] = 99"
        ),
        "the schedule": run("optimizer._learning_rate.decay_rate = 0.5"),
        "another optimizer": run("model.optimizer = keras.optimizers.SGD()"),
        "compiled anew": run("model.compile('sgd', 'mse')"),
        "a metric": run("model.metrics[-1].extra = 3"),
        "a class": run("dense.__class__ = type('Mine', (keras.layers.Dense,), {})"),
        "a method of an instance": run("dense.call = lambda x: x"),
        "a frozen variable": run("dense.kernel.value.requires_grad_(False)"),
        "another tensor": run("dense.kernel._value = torch.nn.Parameter(torch.zeros(9, 2))"),
        "a tensor of another shape": run("dense.bias.value.data = torch.zeros(5)"),
        "a tensor of another type": run("dense.bias.value.data = torch.zeros(2).half()"),
        "memory of another": run("dense.bias.value.data = layer('norm').beta.value.data[:2]"),
        "the path of a variable": run("dense.bias._path = 'other'"),
        "the name of the model": run("model._name = 'other'"),
        "a global": put("SCALE", 2.0),
        "a global that was not there": put("LATER", 5.0),
        "the file of a script": put("__file__", "other.py"),
        "an item of a global": run("script['TABLE']['a'][1]['b'] = 5.0"),
        "a global list grows": run("script['TABLE']['a'].append(5.0)"),
        "a cell": run("script['mine'].__closure__[0].cell_contents = [4.0]"),
        "an item in a cell": run("script['mine'].__closure__[0].cell_contents.append(4.0)"),
        "a default": run("script['mine'].__defaults__ = (3,)"),
        "a default by name": run("script['mine'].__kwdefaults__['weight'] = 3.0"),
        "an attribute of a function": run("script['mine'].extra = 3.0"),
        "an item of it": run("script['mine'].__annotations__['x'] = int"),
        "the code": run(
            "script['mine'].__code__ = script['mine'].__code__.replace(co_firstlineno=9)"
        ),
        "a name of a function": run("script['mine'].__qualname__ = 'other'"),
        "an array": run("dense.array = np.zeros(2)"),
        "an object of the user": run("dense.options = script['Options']()"),
    }
)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_bytes_is_seen(name):
    differs, seen = sees(Case(), CHANGES[name])
    assert differs, "the change is one"
    assert seen


def test_an_import_is_seen(monkeypatch):
    found = dump(Case().model, with_graph=True)
    assert found.is_still()
    monkeypatch.setitem(sys.modules, "any_module_of_a_test", types.ModuleType("any"))
    assert not found.is_still()


class Looks(keras.callbacks.Callback):
    """Notes after each step whether the model is seen to be as after the first one."""

    def __init__(self):
        super().__init__()
        self.found, self.seen = None, []

    def on_train_batch_end(self, batch, logs=None):
        if self.found is None:
            self.found = dump(self.model, with_graph=True)
        self.seen.append(self.found.is_still())
        assert dump(self.model).data == self.found.data


@pytest.mark.parametrize("kind", [None, "Named"])
def test_that_nothing_has_changed_is_seen_of_classes_of_keras(kind):
    looks = Looks()
    Case(kind).model.fit(
        np.ones((8, 4, 1)), np.zeros((8, 2)), batch_size=2, verbose=0, callbacks=[looks]
    )
    assert looks.seen == [kind is None] * 4


class Changes(keras.callbacks.Callback):
    """Changes a regularizer after the fourth step, if at all."""

    def __init__(self, l2):
        super().__init__()
        self.l2 = l2

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and self.l2 is not None:
            self.model.get_layer("conv").kernel_regularizer.l2 = self.l2


@pytest.mark.parametrize(("l2", "times"), [(None, 1), (0.5, 2)])
def test_a_fit_with_a_callback_of_the_user_pickles_its_model_once_and_after_a_change(
    monkeypatch, l2, times
):
    pickled = []
    monkeypatch.setattr(
        step_runner, "dump", lambda model, **how: pickled.append(0) or dump(model, **how)
    )
    found = []
    for devices in (1, 2):
        model = lockstep.distribute(Case().model, devices)
        pickled.clear()
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(16, 4, 1)), rng.normal(size=(16, 2))
        options = {"batch_size": 2, "shuffle": False, "verbose": 0}
        model.get_layer("dropout").rate = 0.0  # its numbers are those of each device
        losses = model.fit(x, y, callbacks=[Changes(l2)], **options).history["loss"]
        lockstep.release(model)
        # Not the weights: Adam makes steps of the rounding of a bias before batch norm.
        found.append([*losses, *model.predict(x, verbose=0).ravel()])
    np.testing.assert_allclose(*found, rtol=0, atol=1e-10)
    assert len(pickled) == times


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (layers.Dense, "call", lambda layer, x: x),
        (layers.Dense, "mine", 3),
        (keras.activations, "relu", 3),
        (torch.nn.Parameter, "mine", 3),
    ],
)
def test_a_change_of_a_package_is_seen(monkeypatch, owner, name, value):
    case = Case()

    def change(case):
        monkeypatch.setattr(owner, name, value, raising=False)

    differs, seen = sees(case, change)
    assert seen or not differs
    assert seen or owner is torch.nn.Parameter


def test_a_rule_of_pickle_that_is_added_is_seen(monkeypatch):
    table = dict(copyreg.dispatch_table)
    monkeypatch.setattr(copyreg, "dispatch_table", table)
    case = Case()
    found = dump(case.model, with_graph=True)
    assert found.is_still()
    table[keras.KerasTensor] = lambda tensor: "any"
    assert not found.is_still()


class Counts:
    """Pickles a number that none of its attributes has."""

    made = 0

    def __reduce__(self):
        Counts.made += 1
        return int, (Counts.made,)


class Slots:
    __slots__ = ("content",)


class Items(list):
    """Has another length than it says."""

    def __len__(self):
        return 0


HIDDEN = Table(
    {
        "an object of the user": lambda: types.SimpleNamespace(a=1),
        "a reducer of its own": Counts,
        "slots": Slots,
        "a list with a length of its own": lambda: Items([1]),
        "an array": lambda: np.zeros(3),
        "a number of NumPy": lambda: np.float64(1.0),
        "bytes that change": lambda: bytearray(b"abc"),
        "a generator": lambda: np.random.default_rng(0),
        "a counter": lambda: itertools.count(),
        "an iterator": lambda: iter([1, 2]),
        "a queue": lambda: collections.deque([1]),
        "a fraction": lambda: fractions.Fraction(1, 2),
        "a lookup": lambda: layers.StringLookup(vocabulary=["a"]),
    }
)


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("deep", [False, True])
def test_of_a_model_with_a_state_that_may_be_hidden_nothing_is_said(name, deep):
    case = Case()
    value = HIDDEN[name]()
    vars(case.dense)["held"] = {"any": [value]} if deep else value  # Keras would track it
    assert dump(case.model, with_graph=True).graph is None
