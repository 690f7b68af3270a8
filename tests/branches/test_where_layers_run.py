"""Every layer really runs on its device: the matrix products of each device are counted."""

import keras
import numpy as np
import pytest

import lockstep
from lockstep.errors import SerialBranchesWarning
from tests.branches.test_branches import assert_equal_runs, chain, rows, train


@pytest.fixture
def products(monkeypatch):
    """Return a function that predicts, and counts the products on each device."""
    from lockstep.engines.jax.branches import branch_steps

    cuts = []
    cut = branch_steps.cut
    monkeypatch.setattr(branch_steps, "cut", lambda *a: cuts.append((a[1], cut(*a))) or cuts[-1][1])

    def count(model, x):
        cuts.clear()
        model.predict(x, verbose=0)
        ((names, found),) = cuts
        counted = {}
        for stage in found.stages:
            for equation in stage.program.jaxpr.eqns:
                if equation.primitive.name == "dot_general":
                    name = names[stage.device]
                    counted[name] = counted.get(name, 0) + 1
        return counted

    return count


def dense(name):
    return keras.layers.Dense(4, name=name)


def x(count=3):
    return np.random.default_rng(0).normal(size=(count, 4)).astype("float32")


@pytest.mark.parametrize("kind", ["functional", "sequential", "unbuilt"])
def test_one_nested_model_on_two_devices(products, kind):
    if kind == "functional":
        inputs = keras.Input((4,))
        base = keras.Model(inputs, dense("second")(dense("first")(inputs)))
    else:
        begin = [keras.Input((4,))] if kind == "sequential" else []
        base = keras.Sequential([*begin, dense("first"), dense("second")])
    a, b = keras.Input((4,)), keras.Input((4,))
    with lockstep.on("cpu:0"):
        left = base(a)
    with lockstep.on("cpu:1"):
        right = base(b)
    with lockstep.on("cpu:2"):
        outputs = dense("head")(keras.layers.add([left, right]))
    model = keras.Model([a, b], outputs)
    assert products(model, [x(), x()]) == {"cpu:0": 2, "cpu:1": 2, "cpu:2": 1}


def test_devices_inside_nested_models(products):
    def tower(device):
        inputs = keras.Input((4,))
        with lockstep.on(device):
            return keras.Model(inputs, dense("tower")(inputs))

    a, b = keras.Input((4,)), keras.Input((4,))
    merged = keras.layers.add([tower("cpu:2")(a), tower("cpu:1")(b)])
    model = keras.Model([a, b], merged)
    assert products(model, [x(), x()]) == {"cpu:2": 1, "cpu:1": 1}


class Three(keras.Model):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = dense("a"), keras.layers.Dense(64, name="b"), dense("c")

    def call(self, inputs):
        return self.c(self.b(self.a(inputs)))


def test_a_layer_on_the_device_of_the_model_around_it(products):
    for model in (
        Three(),
        keras.Sequential([dense("a"), keras.layers.Dense(64, name="b"), dense("c")]),
    ):
        lockstep.place(model, {"a": 0, "b": 1, "c": 0})
        assert products(model, x()) == {"cpu:0": 2, "cpu:1": 1}


def test_a_sequential_model_that_grows(products):
    with pytest.warns(SerialBranchesWarning):
        model = lockstep.place(chain(4), {"dense_0": 0, "dense_1": 1, "dense_2": 0, "dense_3": 1})
    model.pop()
    model.add(dense("new"))
    # The new layer follows its input or its weights.
    assert products(model, x()) == {"cpu:0": 3, "cpu:1": 1}


def test_a_model_of_layers_that_are_placed_is_placed_too(products):
    model = lockstep.place(chain(4), {"dense_[01]": 0, "dense_[23]": 1})
    features = keras.Model(model.inputs, model.get_layer("dense_2").output)
    assert products(features, x()) == {"cpu:0": 2, "cpu:1": 1}
    model.fit(*rows(), verbose=0)
    outputs = keras.layers.Dense(3, name="new_head")(model.outputs[0])
    whole = keras.Model(model.inputs, outputs)
    whole.compile("sgd", "mse")
    whole.fit(rows()[0], np.zeros((22, 3)), verbose=0)


@pytest.mark.parametrize("optimizer", ["adafactor", "lion", "ftrl"])
def test_every_optimizer_makes_its_slots_in_its_own_way(optimizer):
    runs = []
    for places in (None, {"dense_[012]": 0, "dense_[345]": 1}):
        model = chain()
        model.compile(optimizer, "mse")
        if places is not None:
            lockstep.place(model, places)
        runs.append(train(model, *rows()))
    assert_equal_runs(*runs)


def test_losses_that_a_direct_call_adds():
    def build():
        keras.utils.set_random_seed(2)
        inputs = keras.Input((4,))
        y = keras.layers.Dense(4, activity_regularizer="l2", name="first")(inputs)
        return keras.Model(inputs, dense("second")(y))

    plain, placed = build(), lockstep.place(build(), {"first": 0, "second": 1})
    plain(x())
    placed(x())
    assert len(placed.losses) == 1
    np.testing.assert_allclose(placed.losses[0], plain.losses[0], atol=1e-6)


def test_layers_inside_a_loop_run_on_one_device_with_a_warning():
    cells = [keras.layers.LSTMCell(3, name=f"cell_{n}") for n in range(2)]
    inputs = keras.Input((5, 4))
    model = keras.Model(inputs, keras.layers.RNN(cells, name="stack")(inputs))
    lockstep.place(model, {"stack": 0, "*cell_1": 1})
    with pytest.warns(SerialBranchesWarning, match="cpu:1 inside a loop of JAX"):
        model.predict(np.zeros((2, 5, 4)), verbose=0)


def test_a_signal_within_a_stage_waits_for_the_end_of_the_step(monkeypatch):
    import os
    import signal

    from lockstep.engines.jax.branches import staged_program

    model = lockstep.place(chain(), {"dense_[012]": 0, "dense_[345]": 1})
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    model.fit(*rows(), **options)
    call = staged_program.StagedProgram.__call__
    finished = []

    def interrupted(self, *arguments):
        os.kill(os.getpid(), signal.SIGINT)
        results = call(self, *arguments)
        finished.append(True)
        return results

    monkeypatch.setattr(staged_program.StagedProgram, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*rows(), **options)
    assert finished == [True]
    assert all(np.isfinite(w).all() for w in model.get_weights())
