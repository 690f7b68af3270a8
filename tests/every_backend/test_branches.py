"""Branches of one model on different devices: what is and runs where, the numbers, and files."""

import collections

import keras
import numpy as np
import pytest

import lockstep
from lockstep.errors import CheckpointWarning, LayoutConflict, SerialBranchesWarning
from tests.every_backend.branch_models import (
    assert_equal_runs,
    chain,
    config_in,
    data,
    device_of,
    rows,
    train,
    two_branches,
)

BACKEND = keras.backend.backend()
on_jax_and_whole = pytest.mark.whole if BACKEND != "jax" else lambda test: test
"""In the fixed sample on JAX alone."""


@pytest.fixture
def devices(request):
    """The names of three devices that can be told apart."""
    if BACKEND == "torch":
        request.getfixturevalue("gpus")
    return tuple(f"{'gpu' if BACKEND == 'torch' else 'cpu'}:{number}" for number in range(3))


@pytest.fixture
def gpus():
    from tests.torch.simulated_gpus import simulated_gpus

    with simulated_gpus() as simulation:
        yield simulation


@pytest.fixture
def products(request):
    """Return a function that predicts, and counts the matrix products on each device."""
    if BACKEND == "tensorflow":
        from tests.tensorflow.test_on_branches import products_of, ran

        return lambda model, x: products_of(ran(lambda: model.predict(x, verbose=0)))
    if BACKEND == "torch":
        gpus = request.getfixturevalue("gpus")
        return lambda model, x: _products_of_pytorch(gpus, model, x)
    return _products_of_stages(request.getfixturevalue("monkeypatch"))


def _products_of_pytorch(gpus, model, x):
    gpus.operations.clear()
    model.predict(x, verbose=0)
    found = {
        name.replace("lazy", "gpu"): sum(there.get(each, 0) for each in ("mm", "bmm", "addmm"))
        for name, there in gpus.operations.items()
    }
    return {name: count for name, count in found.items() if count and name != "meta"}


def _products_of_stages(monkeypatch):
    from lockstep.engines.jax.branches import branch_programs

    cuts = []
    cut = branch_programs.cut
    monkeypatch.setattr(
        branch_programs, "cut", lambda *a: cuts.append((a[1], cut(*a))) or cuts[-1][1]
    )

    def count(model, x):
        cuts.clear()
        model.predict(x, verbose=0)
        ((names, found),) = cuts
        return collections.Counter(
            names[stage.device]
            for stage in found.stages
            for equation in stage.program.jaxpr.eqns
            if equation.primitive.name == "dot_general"
        )

    return count


@pytest.mark.whole
def test_the_old_recipe_equals_one_device_with_dropout(devices):
    x, y = data()
    assert_equal_runs(train(two_branches(), x, y), train(two_branches(devices), x, y))


def test_every_weight_and_slot_is_on_the_device_of_its_layer(devices):
    x, y = data()
    model = two_branches(devices)
    train(model, x, y)
    homes = {"shared": devices[0], "second": devices[1], "head": devices[2]}
    seen = set()
    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        for layer, home in homes.items():
            if layer in variable.path:
                assert device_of(variable) == home, variable.path
                seen.add((layer, variable.path.startswith("adam")))
    assert seen == {(layer, slot) for layer in homes for slot in (True, False)}


@on_jax_and_whole
def test_slots_are_never_on_the_default_device_first(devices, monkeypatch):
    made = {}
    optimizer = keras.optimizers.Adam
    make = optimizer.add_variable_from_reference

    def note(self, reference, name=None, initializer="zeros"):
        slot = make(self, reference, name, initializer)
        made[slot.path] = device_of(slot)
        return slot

    monkeypatch.setattr(optimizer, "add_variable_from_reference", note)
    x, y = data()
    two_branches(devices).fit(x, y, verbose=0)
    assert {home for path, home in made.items() if "second" in path} == {devices[1]}
    assert {home for path, home in made.items() if "head" in path} == {devices[2]}


@on_jax_and_whole
@pytest.mark.parametrize("kind", ["sequential", "nested", "subclassed"])
def test_layers_are_placed_by_name(devices, kind):
    runs = []
    for places in (None, {"*dense_1*": devices[1], "*dense_3*": 2}):
        model = _of_kind(kind)
        if places is not None:
            lockstep.place(model, places)
        runs.append(train(model, *rows()))
        if places is not None:
            homes = {v.path.split("/")[-2]: device_of(v) for v in model.trainable_variables}
            assert (homes["dense_1"], homes["dense_3"]) == (devices[1], devices[2])
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


@on_jax_and_whole
def test_a_file_carries_no_device(devices, tmp_path):
    x, y = data()
    model = two_branches(devices)
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "placed.keras")
    loaded = keras.models.load_model(tmp_path / "placed.keras")
    assert not hasattr(loaded, "_lockstep")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)
    two_branches().save(tmp_path / "plain.keras")
    assert config_in(tmp_path / "placed.keras") == config_in(tmp_path / "plain.keras")


def test_a_direct_call_and_a_released_model_run_on_one_device(devices):
    x, y = data()
    model, plain = two_branches(devices), two_branches()
    plain.set_weights(model.get_weights())
    expected = keras.ops.convert_to_numpy(plain(x))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(model(x)), expected, atol=1e-6)
    lockstep.release(model)
    assert {device_of(v) for v in model.variables} == {devices[0]}
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)
    model.fit(x, y, verbose=0)


def test_a_killed_run_goes_on(tmp_path):
    x, y = data()
    devices = ("cpu:0", "cpu:1", "cpu:2")
    whole = two_branches(devices)
    options = {"batch_size": 5, "epochs": 3, "verbose": 0, "shuffle": False}
    # On PyTorch, a loader without a checkpoint takes one number more of those for dropout.
    whole.fit(x, y, callbacks=[lockstep.Checkpoint(tmp_path / "whole", steps=1)], **options)

    class Stop(keras.callbacks.Callback):
        at = 2

        def on_train_batch_end(self, batch, logs=None):
            if batch == self.at and self.model.optimizer.iterations > 7:
                raise RuntimeError("killed")

    checkpoint = lockstep.Checkpoint(tmp_path / "run", steps=1)
    with pytest.raises(RuntimeError, match="killed"):
        two_branches(devices).fit(x, y, callbacks=[checkpoint, Stop()], **options)
    resumed, goes_on = two_branches(devices), Stop()
    goes_on.at = None
    checkpoint = lockstep.Checkpoint(tmp_path / "run", steps=1)
    with pytest.warns(CheckpointWarning, match="Stop has no get_state"):
        resumed.fit(x, y, callbacks=[checkpoint, goes_on], **options)
    for mine, theirs in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_every_method_that_takes_one_batch(devices):
    x, y = data()
    found = []
    for model in (two_branches(), two_branches(devices)):
        keras.utils.set_random_seed(7)  # on PyTorch, dropout without a seed draws from its state
        results = [model.train_on_batch(x, y) for _ in range(3)]
        results += [model.test_on_batch(x, y), model.predict_on_batch(x)]
        found.append(dict(enumerate(map(np.array, results))))
    assert_equal_runs(*found)


@on_jax_and_whole
def test_callbacks_read_and_write_weights(devices):
    class Halve(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.set_weights([w / 2 for w in self.model.get_weights()])
                self.model.optimizer.learning_rate = 0.01

    x, y = data()
    runs = [
        train(two_branches(d), x, y, callbacks=[Halve(), keras.callbacks.EarlyStopping()])
        for d in (None, devices)
    ]
    assert_equal_runs(*runs)


@on_jax_and_whole
def test_layers_that_go_back_and_forth_are_exact_and_warned_of(devices):
    with pytest.warns(SerialBranchesWarning, match=r"'dense_1' on \w+:1 needs 'dense_0' on \w+:0"):
        model = lockstep.place(chain(), {"dense_0": 0, "dense_1": 1, "dense_2": 0})
    assert_equal_runs(train(chain(), *rows()), train(model, *rows()))


def dense(name):
    return keras.layers.Dense(4, name=name)


def x(count=3):
    return np.random.default_rng(0).normal(size=(count, 4)).astype("float32")


@on_jax_and_whole
@pytest.mark.parametrize("kind", ["functional", "sequential", "unbuilt"])
def test_one_nested_model_on_two_devices(devices, products, kind):
    if kind == "functional":
        inputs = keras.Input((4,))
        base = keras.Model(inputs, dense("second")(dense("first")(inputs)))
    else:
        begin = [keras.Input((4,))] if kind == "sequential" else []
        base = keras.Sequential([*begin, dense("first"), dense("second")])
    a, b = keras.Input((4,)), keras.Input((4,))
    with lockstep.on(devices[0]):
        left = base(a)
    with lockstep.on(devices[1]):
        right = base(b)
    with lockstep.on(devices[2]):
        outputs = dense("head")(keras.layers.add([left, right]))
    model = keras.Model([a, b], outputs)
    assert products(model, [x(), x()]) == {devices[0]: 2, devices[1]: 2, devices[2]: 1}


def test_devices_inside_nested_models(devices, products):
    def tower(device):
        inputs = keras.Input((4,))
        with lockstep.on(device):
            return keras.Model(inputs, dense("tower")(inputs))

    a, b = keras.Input((4,)), keras.Input((4,))
    merged = keras.layers.add([tower(devices[2])(a), tower(devices[1])(b)])
    model = keras.Model([a, b], merged)
    assert products(model, [x(), x()]) == {devices[2]: 1, devices[1]: 1}


class Three(keras.Model):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = dense("a"), keras.layers.Dense(64, name="b"), dense("c")

    def call(self, inputs):
        return self.c(self.b(self.a(inputs)))


@on_jax_and_whole
def test_a_layer_on_the_device_of_the_model_around_it(devices, products):
    for model in (
        Three(),
        keras.Sequential([dense("a"), keras.layers.Dense(64, name="b"), dense("c")]),
    ):
        lockstep.place(model, {"a": 0, "b": 1, "c": 0})
        assert products(model, x()) == {devices[0]: 2, devices[1]: 1}


@on_jax_and_whole
def test_a_sequential_model_that_grows(devices, products):
    with pytest.warns(SerialBranchesWarning):
        model = lockstep.place(chain(4), {"dense_0": 0, "dense_1": 1, "dense_2": 0, "dense_3": 1})
    model.pop()
    model.add(dense("new"))
    # The new layer follows its input or its weights. On PyTorch it runs where the outputs were.
    new = BACKEND == "torch"
    assert products(model, x()) == {devices[0]: 3 - new, devices[1]: 1 + new}


def test_a_model_of_layers_that_are_placed_is_placed_too(devices, products):
    model = lockstep.place(chain(4), {"dense_[01]": 0, "dense_[23]": 1})
    features = keras.Model(model.inputs, model.get_layer("dense_2").output)
    assert products(features, x()) == {devices[0]: 2, devices[1]: 1}
    model.fit(*rows(), verbose=0)
    outputs = keras.layers.Dense(3, name="new_head")(model.outputs[0])
    whole = keras.Model(model.inputs, outputs)
    whole.compile("sgd", "mse")
    whole.fit(rows()[0], np.zeros((22, 3)), verbose=0)


@pytest.mark.thorough
@on_jax_and_whole
@pytest.mark.parametrize("optimizer", ["adafactor", "lion", "ftrl"])
def test_every_optimizer_makes_its_slots_in_its_own_way(devices, optimizer):
    runs = []
    for places in (None, {"dense_[012]": 0, "dense_[345]": 1}):
        model = chain()
        model.compile(optimizer, "mse")
        if places is not None:
            lockstep.place(model, places)
        runs.append(train(model, *rows()))
    assert_equal_runs(*runs)


@on_jax_and_whole
def test_losses_that_a_direct_call_adds(devices):
    def build():
        keras.utils.set_random_seed(2)
        inputs = keras.Input((4,))
        y = keras.layers.Dense(4, activity_regularizer="l2", name="first")(inputs)
        return keras.Model(inputs, dense("second")(y))

    plain, placed = build(), lockstep.place(build(), {"first": 0, "second": 1})
    plain(x())
    placed(x())
    assert len(placed.losses) == 1
    one, other = (keras.ops.convert_to_numpy(each.losses[0]) for each in (plain, placed))
    np.testing.assert_allclose(other, one, atol=1e-6)


def test_branches_and_copies_at_once():
    model = lockstep.place(chain(), {"dense_1": 1})
    with pytest.raises(LayoutConflict, match=r"lockstep\.distribute.*\n.*\n.*lockstep\.release"):
        lockstep.distribute(model, 2)
    lockstep.distribute(lockstep.release(model), 2)
    with pytest.raises(LayoutConflict, match=r"lockstep\.place"):
        lockstep.place(model, {"dense_1": 1})


def test_a_variable_that_another_model_has_elsewhere():
    model = chain()
    lockstep.place(model, {"dense_1": 1})
    part = keras.Sequential([keras.Input((8,)), model.get_layer("dense_1")])
    with pytest.raises(LayoutConflict, match="shared with"):
        lockstep.place(part, {"dense_1": 2})
    lockstep.place(part, {"dense_1": 1})
