"""Branches of one model on different devices: the old recipe, where things live, and files."""

import keras
import numpy as np
import pytest

import lockstep
from lockstep.errors import CheckpointWarning, SerialBranchesWarning

ROWS = 26
DEVICES = ("cpu:0", "cpu:1", "cpu:2")


def data(seed=0):
    rng = np.random.default_rng(seed)
    x = [rng.normal(size=(ROWS, 5, 3)).astype("float32") for _ in range(2)]
    return x, rng.normal(size=(ROWS, 2)).astype("float32")


def two_branches(devices=None, optimizer="adam", **options):
    """The old recipe: a shared LSTM on two devices, and the rest on a third."""
    from contextlib import nullcontext

    keras.utils.clear_session(free_memory=False)  # the names of layers begin anew
    keras.utils.set_random_seed(4)
    on = [nullcontext()] * 3 if devices is None else [lockstep.on(device) for device in devices]
    a, b = keras.Input((5, 3), name="a"), keras.Input((5, 3), name="b")
    shared = keras.layers.LSTM(4, name="shared")
    with on[0]:
        encoded_a = shared(a)
    with on[1]:
        encoded_b = keras.layers.Dense(3, name="second")(shared(b))
    with on[2]:
        merged = keras.layers.Concatenate(name="merged")([encoded_a, encoded_b])
    outputs = keras.layers.Dense(2, name="head")(keras.layers.Dropout(0.3, name="drop")(merged))
    model = keras.Model([a, b], outputs, name="two_branches")
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    return model


def chain(count=6, norm=False):
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(8, activation="tanh", name=f"dense_{n}") for n in range(count)]
    if norm:
        layers.insert(2, keras.layers.BatchNormalization(name="norm"))
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", "mse")
    return model


def rows(count=22):
    rng = np.random.default_rng(2)
    return rng.normal(size=(count, 4)).astype("f4"), rng.normal(size=(count, 8)).astype("f4")


def train(model, x, y, **options):
    keras.utils.set_random_seed(6)  # of the shuffling
    options = {"batch_size": 8, "epochs": 2, "verbose": 0, "validation_split": 0.2, **options}
    history = model.fit(x, y, **options).history
    found = {name: np.array(values) for name, values in history.items()}
    found["predict"] = model.predict(x, batch_size=7, verbose=0)
    found["evaluate"] = np.array(model.evaluate(x, y, verbose=0))
    slots = model.optimizer.variables
    return found | {v.path: keras.ops.convert_to_numpy(v) for v in [*model.variables, *slots]}


def assert_equal_runs(one, many):
    for mine, theirs in zip(many.values(), one.values(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


def device_of(variable):
    if keras.backend.backend() == "tensorflow":
        return variable.value.device.split("/device:")[1].lower()
    (device,) = variable.value.devices()
    return f"cpu:{device.id}"


@pytest.mark.whole
def test_the_old_recipe_equals_one_device_with_dropout():
    x, y = data()
    assert_equal_runs(train(two_branches(), x, y), train(two_branches(DEVICES), x, y))


def test_every_weight_and_slot_is_on_the_device_of_its_layer():
    x, y = data()
    model = two_branches(DEVICES)
    train(model, x, y)
    homes = {"shared": "cpu:0", "second": "cpu:1", "head": "cpu:2"}
    seen = set()
    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        for layer, home in homes.items():
            if layer in variable.path:
                assert device_of(variable) == home, variable.path
                seen.add((layer, variable.path.startswith("adam")))
    assert seen == {(layer, slot) for layer in homes for slot in (True, False)}


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


def test_slots_are_never_on_the_default_device_first(monkeypatch):
    made = {}
    optimizer = keras.optimizers.Adam
    make = optimizer.add_variable_from_reference

    def note(self, reference, name=None, initializer="zeros"):
        slot = make(self, reference, name, initializer)
        made[slot.path] = device_of(slot)
        return slot

    monkeypatch.setattr(optimizer, "add_variable_from_reference", note)
    x, y = data()
    two_branches(DEVICES).fit(x, y, verbose=0)
    assert {home for path, home in made.items() if "second" in path} == {"cpu:1"}
    assert {home for path, home in made.items() if "head" in path} == {"cpu:2"}


@pytest.mark.parametrize("kind", ["sequential", "nested", "subclassed"])
def test_layers_are_placed_by_name(kind):
    runs = []
    for places in (None, {"*dense_1*": "cpu:1", "*dense_3*": 2}):
        model = _of_kind(kind)
        if places is not None:
            lockstep.place(model, places)
        runs.append(train(model, *rows()))
        if places is not None:
            homes = {v.path.split("/")[-2]: device_of(v) for v in model.trainable_variables}
            assert (homes["dense_1"], homes["dense_3"]) == ("cpu:1", "cpu:2")
    assert_equal_runs(*runs)


def _of_kind(kind):
    if kind == "sequential":
        return chain()
    keras.utils.set_random_seed(4)
    if kind == "nested":
        inner = keras.Sequential([keras.Input((8,)), *_dense(1, 4)], name="inner")
        inputs = keras.Input((4,))
        outputs = keras.layers.Dense(8, name="last")(inner(keras.layers.Dense(8)(inputs)))
        model = keras.Model(inputs, outputs)
    else:
        model = Chain()
        model.build((None, 4))
    model.compile("adam", "mse")
    return model


def _dense(first, last):
    return [keras.layers.Dense(8, name=f"dense_{n}") for n in range(first, last)]


class Chain(keras.Model):
    def __init__(self):
        super().__init__()
        self.steps = _dense(0, 4)

    def build(self, shape):
        for layer in self.steps:
            layer.build(shape)
            shape = (None, 8)

    def call(self, x):
        for layer in self.steps:
            x = keras.ops.tanh(layer(x))
        return x


def config_in(path):
    import json
    import re
    import zipfile

    with zipfile.ZipFile(path) as file:
        text = file.read("config.json").decode()
    # Keras writes the identity of an object in this process.
    return json.loads(re.sub(r'"shared_object_id": \d+', "", text).replace(", }", "}"))


def test_a_file_carries_no_device(tmp_path):
    x, y = data()
    model = two_branches(DEVICES)
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "placed.keras")
    loaded = keras.models.load_model(tmp_path / "placed.keras")
    assert not hasattr(loaded, "_lockstep")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)
    two_branches().save(tmp_path / "plain.keras")
    assert config_in(tmp_path / "placed.keras") == config_in(tmp_path / "plain.keras")


def test_a_direct_call_and_a_released_model_run_on_one_device():
    x, y = data()
    model, plain = two_branches(DEVICES), two_branches()
    plain.set_weights(model.get_weights())
    np.testing.assert_allclose(model(x), plain(x), atol=1e-6)
    lockstep.release(model)
    assert {device_of(v) for v in model.variables} == {"cpu:0"}
    np.testing.assert_allclose(model.predict(x, verbose=0), plain(x), atol=1e-6)
    model.fit(x, y, verbose=0)


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


def test_a_killed_run_goes_on(tmp_path):
    x, y = data()
    whole = two_branches(DEVICES)
    options = {"batch_size": 5, "epochs": 3, "verbose": 0, "shuffle": False}
    whole.fit(x, y, **options)

    class Stop(keras.callbacks.Callback):
        at = 2

        def on_train_batch_end(self, batch, logs=None):
            if batch == self.at and self.model.optimizer.iterations > 7:
                raise RuntimeError("killed")

    checkpoint = lockstep.Checkpoint(tmp_path / "run", steps=1)
    with pytest.raises(RuntimeError, match="killed"):
        two_branches(DEVICES).fit(x, y, callbacks=[checkpoint, Stop()], **options)
    resumed, goes_on = two_branches(DEVICES), Stop()
    goes_on.at = None
    checkpoint = lockstep.Checkpoint(tmp_path / "run", steps=1)
    with pytest.warns(CheckpointWarning, match="Stop has no get_state"):
        resumed.fit(x, y, callbacks=[checkpoint, goes_on], **options)
    for mine, theirs in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_every_method_that_takes_one_batch():
    x, y = data()
    one, many = two_branches(), two_branches(DEVICES)
    for _ in range(3):
        np.testing.assert_allclose(many.train_on_batch(x, y), one.train_on_batch(x, y), atol=1e-6)
    np.testing.assert_allclose(many.test_on_batch(x, y), one.test_on_batch(x, y), atol=1e-6)
    np.testing.assert_allclose(many.predict_on_batch(x), one.predict_on_batch(x), atol=1e-6)


def test_callbacks_read_and_write_weights():
    class Halve(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.set_weights([w / 2 for w in self.model.get_weights()])
                self.model.optimizer.learning_rate = 0.01

    x, y = data()
    runs = [
        train(two_branches(d), x, y, callbacks=[Halve(), keras.callbacks.EarlyStopping()])
        for d in (None, DEVICES)
    ]
    assert_equal_runs(*runs)


def two_branches_apart():
    keras.utils.set_random_seed(4)
    a, b = keras.Input((5, 3)), keras.Input((5, 3))
    left, right = keras.layers.LSTM(4, name="left")(a), keras.layers.LSTM(4, name="right")(b)
    model = keras.Model([a, b], keras.layers.Dense(2)(keras.layers.concatenate([left, right])))
    model.compile("sgd", "mse")
    return model


def test_the_table_of_what_runs_where(capsys):
    lockstep.placement(two_branches(DEVICES))
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if "second" in line)
    assert "cpu:1" in line
    assert "60" in line  # (4 x 3 + 3) x 4 bytes
    assert any("12 from cpu:1" in line for line in lines)


def test_every_model_has_a_placement(capsys):
    """It raised for a model that is not placed by layers."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8)], name="one")
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    lockstep.placement(model)
    said = capsys.readouterr().out
    assert "'one' on cpu:0: one device" in said
    weights = (6 * 8 + 8) * 4
    slots = weights + 4 + 4  # the number of the step, and the rate
    assert [line.strip("│ ").split() for line in said.splitlines() if line.startswith("│")] == [
        ["cpu:0", "│", str(weights), "│", str(slots)]
    ]
    lockstep.placement(lockstep.distribute(model, 2))
    said = capsys.readouterr().out
    assert "data parallel" in said
    assert sum(str(weights) in line for line in said.splitlines()) == 2
    lockstep.release(model)


def test_layers_that_go_back_and_forth_are_exact_and_warned_of():
    with pytest.warns(SerialBranchesWarning, match="'dense_1' on cpu:1 needs 'dense_0' on cpu:0"):
        model = lockstep.place(chain(), {"dense_0": 0, "dense_1": 1, "dense_2": 0})
    assert_equal_runs(train(chain(), *rows()), train(model, *rows()))
