"""Branches on JAX: the stages of a step, and the table of what runs where."""

import json

import keras
import numpy as np
import pytest

import lockstep
from lockstep.errors import SerialBranchesWarning
from tests.every_backend.branch_models import chain, data, rows, two_branches

DEVICES = ("cpu:0", "cpu:1", "cpu:2")


def test_every_stage_returns_its_outputs_on_its_device(monkeypatch):
    from lockstep.engines.jax.branches import staged_program

    found = []
    plan = staged_program._runs

    def runs(*args):
        made = plan(*args)
        return [_watched(run, found) for run in made]

    monkeypatch.setattr(staged_program, "_runs", runs)
    x, y = data()
    two_branches(DEVICES).fit(x, y, batch_size=13, verbose=0)
    assert {device for device, _ in found} == {0, 1, 2}
    assert all(homes <= {device} for device, homes in found)


def _watched(run, found):
    import dataclasses

    def program(*arguments):
        results = run.program(*arguments)
        found.append((run.device, {d.id for value in results for d in value.devices()}))
        return results

    return dataclasses.replace(run, program=program)


def test_no_device_holds_more_than_its_layers():
    import jax

    model = chain()
    lockstep.place(model, {"dense_[012]": 0, "dense_[345]": 1})
    x, y = rows()
    before = {id(array) for array in jax.live_arrays()}
    model.fit(x, y, batch_size=22, verbose=0)
    held = {0: 0, 1: 0}
    for array in jax.live_arrays():
        if id(array) not in before and array.nbytes > 16:  # no counter
            (device,) = array.devices()
            held[device.id] += array.nbytes
    sizes = {
        n: 4 * sum(w.size for w in model.get_layer(f"dense_{n}").get_weights()) for n in range(6)
    }
    # The weights were there, but a step returns new arrays: weights and two slots of Adam.
    for device, layers in ((0, (0, 1, 2)), (1, (3, 4, 5))):
        assert held[device] <= 1.01 * 3 * sum(sizes[n] for n in layers) + x.nbytes + y.nbytes


def test_a_step_is_traced_anew_after_compile_and_on_other_devices():
    """JAX keeps the trace of a function, and a step is the same method of the model."""
    x, y = rows()
    found = []
    for places in (None, {"dense_*": "cpu:1"}):
        model = chain(2)
        for loss, activation in (("mse", "tanh"), ("mae", "tanh"), ("mae", "sigmoid")):
            model.layers[0].activation = keras.activations.get(activation)
            model.compile("sgd", loss)
            if places:
                lockstep.release(model)
                lockstep.place(model, places if loss == "mse" else {"dense_1": "cpu:2"})
            model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
            model.compile("sgd", "huber")
            model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        found.append(model.get_weights())
    for one, placed in zip(*found, strict=True):
        np.testing.assert_allclose(one, placed, rtol=0, atol=1e-6)


def test_the_table_of_what_runs_where():
    found = lockstep.placement(two_branches(DEVICES))
    lines = str(found).splitlines()
    assert "second" in found._repr_html_()
    assert json.loads(found.as_json())["layers"][0]["device"] == "cpu:0, cpu:1"
    line = next(line for line in lines if "second" in line)
    assert "cpu:1" in line
    assert "60" in line  # (4 x 3 + 3) x 4 bytes
    assert any("12 from cpu:1" in line for line in lines)


def test_every_model_has_a_placement():
    """It raised for a model that is not placed by layers."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8)], name="one")
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    said = str(lockstep.placement(model))
    assert "'one' on cpu:0: one device" in said
    weights = (6 * 8 + 8) * 4
    slots = weights + 4 + 4  # the number of the step, and the rate
    assert [line.strip("│ ").split() for line in said.splitlines() if line.startswith("│")] == [
        ["cpu:0", "│", str(weights), "│", str(slots)]
    ]
    found = lockstep.placement(lockstep.distribute(model, 2))
    assert found.weights == {"cpu:0": weights, "cpu:1": weights}
    said = str(found)
    assert "data parallel" in said
    assert sum(str(weights) in line for line in said.splitlines()) == 2
    lockstep.release(model)


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
