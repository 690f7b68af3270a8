"""Branches of one model on different devices: what is and runs where, the numbers, and files."""

import collections
from contextlib import nullcontext

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.attach.attachment import session_of
from lockstep.errors import CheckpointWarning, SerialBranchesWarning
from tests.agreement import BOUND
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
from tests.tables import Table
from tests.tiers import further, quick_on

BACKEND = keras.backend.backend()
NEAR = min(BOUND, 1e-6)
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


def test_the_old_recipe_equals_one_device_with_dropout(devices, products):
    """The numbers, the homes of weights and slots, and where products run."""
    x, y = data()
    model = two_branches(devices)
    found = products(model, x)
    assert found[devices[2]] == 1  # the head
    if BACKEND != "jax":  # where those of an LSTM are in a loop, which is not counted
        assert {*found} == {*devices}
        assert found[devices[1]] == found[devices[0]] + 1  # the LSTM, and a dense layer
    assert_equal_runs(train(two_branches(), x, y), train(model, x, y))
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


def test_files_direct_calls_and_a_released_model_are_those_of_one_device(devices, tmp_path):
    x, y = data()
    model, plain = two_branches(devices), two_branches()
    model.fit(x, y, verbose=0)
    expected = model.predict(x, verbose=0)
    plain.set_weights(model.get_weights())

    def assert_expected(found):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(found), expected, atol=NEAR)

    assert_expected(plain(x))
    assert_expected(model(list(map(keras.ops.convert_to_tensor, x))))
    model.save(tmp_path / "placed.keras")
    plain.save(tmp_path / "plain.keras")
    assert config_in(tmp_path / "placed.keras") == config_in(tmp_path / "plain.keras")
    loaded = keras.models.load_model(tmp_path / "placed.keras")
    lockstep.release(model)
    for each in (loaded, model):
        assert session_of(each) is None
        every = [*each.variables, *each.optimizer.variables]
        assert {device_of(variable) for variable in every} == {devices[0]}
        assert_expected(each.predict(x, verbose=0))
    assert not [layer for layer in model._flatten_layers() if "call" in vars(layer)]
    model.fit(x, y, verbose=0)


def test_a_failure_leaves_the_model_as_it_was(devices, monkeypatch):
    model = chain()
    attributes, methods = set(vars(model)), [dict(vars(layer)) for layer in model.layers]

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lockstep.attach.attachment._put_on", fail)
    with pytest.raises(KeyboardInterrupt):
        lockstep.place(model, {"dense_[024]": 0, "dense_[135]": 1})
    monkeypatch.undo()
    assert set(vars(model)) == attributes
    assert [dict(vars(layer)) for layer in model.layers] == methods
    assert {device_of(variable) for variable in model.variables} == {devices[0]}


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


@quick_on("torch", "jax")
def test_a_sequential_model_that_grows(devices, products):
    with pytest.warns(SerialBranchesWarning):
        model = lockstep.place(chain(4), {"dense_0": 0, "dense_1": 1, "dense_2": 0, "dense_3": 1})
    model.pop()
    model.add(dense("new"))
    # The new layer follows its input or its weights. On PyTorch it runs where the outputs were.
    new = BACKEND == "torch"
    assert products(model, x()) == {devices[0]: 3 - new, devices[1]: 1 + new}
    model.compile("adam", "mse")
    model.fit(rows()[0], np.zeros((22, 4)), verbose=0)


@quick_on("torch")
def test_a_model_around_one_that_is_placed(devices):
    model = lockstep.place(chain(2), {"dense_0": 2, "dense_1": 1})
    around = keras.Sequential([model, layers.Dense(3, name="new")])
    around.compile("adam", "mse")
    lockstep.place(around, {"new": 0})
    around.fit(rows()[0], np.zeros((22, 3)), verbose=0)
    homes = [device_of(layer.kernel) for layer in (*model.layers, around.get_layer("new"))]
    assert homes == [devices[2], devices[1], devices[0]]


def test_a_model_of_layers_that_are_placed_is_placed_too(devices, products):
    model = lockstep.place(chain(4), {"dense_[01]": 0, "dense_[23]": 1})
    features = keras.Model(model.inputs, model.get_layer("dense_2").output)
    assert products(features, x()) == {devices[0]: 2, devices[1]: 1}
    model.fit(*rows(), verbose=0)
    outputs = keras.layers.Dense(3, name="new_head")(model.outputs[0])
    whole = keras.Model(model.inputs, outputs)
    whole.compile("sgd", "mse")
    whole.fit(rows()[0], np.zeros((22, 3)), verbose=0)


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


# ---------------------------------------------------------------------------- optimizers


class Total(keras.optimizers.SGD):
    """Each update depends on those before, of any device."""

    def build(self, variables):
        super().build(variables)
        self.total = self.add_variable((), name="total")

    def update_step(self, gradient, variable, learning_rate):
        self.total.assign_add(keras.ops.sum(keras.ops.abs(gradient)))
        variable.assign_sub(learning_rate * gradient / (1 + self.total))


optimizers = keras.optimizers
OPTIMIZERS = Table(
    {
        "Adafactor": lambda: optimizers.Adafactor(0.01),
        "a number of all variables": lambda: Total(0.1),
        "Nadam": lambda: optimizers.Nadam(0.01, weight_decay=0.1),
        "global norm, average": lambda: optimizers.Adam(
            0.01, global_clipnorm=0.05, use_ema=True, ema_momentum=0.5
        ),
        "norm, accumulation": lambda: optimizers.AdamW(
            0.01, clipnorm=0.05, gradient_accumulation_steps=2
        ),
        "Ftrl": lambda: optimizers.Ftrl(0.01, clipvalue=0.01),
        "a schedule": lambda: optimizers.SGD(
            optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.9, nesterov=True
        ),
        "scaled Lion": lambda: optimizers.LossScaleOptimizer(
            optimizers.Lion(0.01), initial_scale=8.0
        ),
    }
)
if BACKEND == "jax":  # where Keras alone gives the arrays of the averages away
    del OPTIMIZERS["global norm, average"]
IN_QUICK = [*OPTIMIZERS][:2] if BACKEND == "torch" else []


@pytest.mark.parametrize(
    "name", [*IN_QUICK, *further(*(each for each in OPTIMIZERS if each not in IN_QUICK))]
)
def test_optimizers(devices, name):
    """Each has slots of its own, beside a regularizer and a constraint."""
    runs = []
    for places in (None, {"dense_[024]": 0, "dense_[135]": 1}):
        model = chain()
        model.layers[1].kernel.regularizer = keras.regularizers.L1L2(0.01, 0.01)
        model.layers[3].kernel.constraint = keras.constraints.MaxNorm(0.5)
        model.compile(OPTIMIZERS[name](), "mse", metrics=["mae"])
        if places is not None:
            with pytest.warns(SerialBranchesWarning):
                lockstep.place(model, places)
        runs.append(train(model, *rows()))
    assert_equal_runs(*runs)


# ------------------------------------------------------------------- one layer on two devices


def embedding(a, b, on):
    shared = layers.Embedding(9, 3)
    with on[0]:
        left = layers.Flatten()(shared(a))
    with on[1]:
        return left, layers.Flatten()(shared(b))


class Scaled(layers.Layer):
    """Assigns to its weight while it is called, as spectral normalization does."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        self.scale.assign(self.scale * 0.9)
        return x * self.scale


def assigning(make):
    """A layer that does more than read its weight, on another device."""

    def build(a, b, on):
        shared = make()
        with on[0]:
            left = shared(a)
        with on[1]:
            return left, shared(b)

    return build


def statistics(a, b, on):
    tower = [keras.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.2)]
    tower = keras.Sequential(tower)
    with on[0]:
        left = tower(a)
    with on[1]:
        return left, tower(layers.Dense(4, activity_regularizer="l1")(b))


def towers(a, b, on):
    """Nested models whose layers have the same names."""
    found = []
    for inputs, place in ((a, on[0]), (b, on[1])):
        one = keras.Input((4,))
        with place:
            tower = keras.Model(one, layers.Dense(4, name="tower")(one))
        found.append(tower(inputs))
    return found


SHARED = Table(
    {
        "statistics": statistics,
        "towers": towers,
        "embedding": embedding,
        "an assignment": assigning(Scaled),
        # Both the wrapper and the layer in it have the kernel, which the wrapper assigns to.
        "spectral norms": assigning(lambda: layers.SpectralNormalization(layers.Dense(4, "tanh"))),
    }
)
QUICK_SHARED = {"torch": ("statistics", "towers"), "tensorflow": tuple(SHARED)[2:], "jax": ()}[
    BACKEND
]


@pytest.mark.parametrize(
    "name", [*QUICK_SHARED, *further(*(each for each in SHARED if each not in QUICK_SHARED))]
)
def test_layers_on_two_devices_leave_what_one_device_leaves(devices, name):
    x, y = rows()
    x = [np.random.default_rng(0).integers(0, 9, x.shape) if name == "embedding" else x] * 2
    runs = []
    for places in (None, devices[1:]):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        dtype = "int32" if name == "embedding" else None
        a, b = (keras.Input((4,), dtype=dtype) for _ in range(2))
        on = [nullcontext() if places is None else lockstep.on(places[n]) for n in range(2)]
        both = SHARED[name](a, b, on)
        model = keras.Model([a, b], layers.Dense(8)(layers.add(both)))
        model.compile("sgd", "mse", metrics=["mae"])  # Adam makes updates of what is rounding
        runs.append(train(model, x, y))
    assert_equal_runs(*runs)
