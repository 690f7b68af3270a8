"""Workers run the code and the state of the caller, and the caller's own code stays as it is."""

import functools
import queue
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import lockstep
from lockstep.core.travelling_objects import reduced
from lockstep.engines.torch.ranks import pool
from lockstep.engines.torch.ranks.launcher_peers import LauncherPeers
from lockstep.engines.torch.ranks.peers import NoPeers, Peers
from lockstep.engines.torch.ranks.pool_peers import PoolPeers
from lockstep.engines.torch.ranks.rank import Marked, Rank
from lockstep.engines.torch.same_model.model_pickle import dump
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel
from tests.agreement import assert_equal, both, values
from tests.tiers import every, further
from tests.torch import script_settings

QUIET = {"verbose": 0, "shuffle": False, "batch_size": 7}

pytestmark = pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")


def data(width=4):
    rng = np.random.default_rng(1)
    return rng.normal(size=(16, width)), rng.normal(size=(16, 2))


def sequential(*inner):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), *inner, layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def assert_trains_equally(build, **options):
    one, many = both(build)
    x, y = data()
    for model in (one, many):
        model.fit(x, y, **QUIET, **options)
    assert_equal(one, many)
    assert_equal(one.predict(x, verbose=0), many.predict(x, verbose=0))
    lockstep.release(many)


# ------------------------------------------------------------------- models and layers that travel


@pytest.mark.parametrize("hub", [script_settings.Hub, script_settings.DeeperHub])
def test_a_functional_model_made_by_a_class_of_a_module(hub):
    def build():
        model = hub(5)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    assert_trains_equally(build)


class Keeps(layers.Layer):
    def call(self, x):
        self.last = x
        self.maps = [x, ops.tanh(x)]
        return x


def test_a_layer_that_keeps_what_it_saw():
    assert_trains_equally(lambda: sequential(Keeps()), epochs=2)


# ------------------------------------------------------------------- what cannot be pickled


class Holds(layers.Layer):
    """Has a key to sort by, which a subclass may use."""

    def __init__(self, **options):
        super().__init__(**options)
        self.key = functools.cmp_to_key(len)(1.0)

    def call(self, x):
        return x * 2.0


class Uses(Holds):
    def call(self, x):
        return x * 2.0 * self.key.obj


class HidesErrors(Holds):
    def call(self, x):
        try:
            return x * (3.0 if self.key.obj else 2.0)
        except Exception:
            return x * 5.0


class UsesInTraining(Holds):
    def call(self, x, training=False):
        return x * 2.0 if training and self.key.obj else x


class UsesInLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss * self.held.key.obj


class Shared(keras.Sequential):
    """Has a step of its own."""

    def train_step(self, data):
        x, y = data
        loss = self.compute_loss(x, y, self(x, training=True))
        self.zero_grad()
        loss.backward()
        self.optimizer.apply([v.value.grad for v in self.trainable_variables])
        return {"loss": loss.detach()}


class UsesInStep(Shared):
    def train_step(self, data):
        assert self.held.key.obj
        return super().train_step(data)


class Task(keras.Model):
    """Has a layer that is none of its own, as the tasks of KerasHub have a tokenizer."""

    held = None

    @property
    def layers(self):
        return [each for each in super().layers if not self.held or each is not self.held]


def task():
    inputs = keras.Input((4,))
    model = Task(inputs, layers.Dense(2)(layers.Dense(3)(inputs)))
    model.held = Uses()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def holding(kind, layer=Holds):
    def build():
        model = kind([keras.Input((4,)), layers.Dense(3), layer(name="held"), layers.Dense(2)])
        model.held = model.layers[1]
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    return build


@pytest.mark.filterwarnings("error::lockstep.errors.UnsplitBatchWarning")
@pytest.mark.parametrize(
    "build", [holding(keras.Sequential), holding(Shared), task], ids=["layer", "own step", "task"]
)
def test_what_no_step_uses_need_not_be_pickled(build):
    assert_trains_equally(build)


@pytest.mark.parametrize(
    "build",
    [
        holding(keras.Sequential, Uses),
        *further(
            holding(keras.Sequential, HidesErrors),
            holding(keras.Sequential, UsesInTraining),
            holding(UsesInLoss),
            holding(UsesInStep),
        ),
    ],
    ids=["layer", "errors hidden", "training", "loss", "step"],
)
def test_a_step_that_uses_what_cannot_be_pickled_is_run_by_the_first_device(build):
    what = (
        r"uses key of 'held', which cannot be pickled: cannot pickle 'functools.KeyWrapper' object"
    )
    with pytest.warns(UnsplitBatchWarning, match=what):
        assert_trains_equally(build)


@pytest.mark.thorough
def test_a_step_without_a_check_refuses_what_cannot_be_pickled(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")
    one, many = both(holding(UsesInLoss))
    with pytest.raises(UnsupportedModel, match=r"A train step of .* uses key of 'held'"):
        many.fit(*data(), **QUIET)
    assert_equal(one.get_weights(), many.get_weights())  # nothing was updated
    lockstep.release(many)


# ------------------------------------------------------------------- what a script holds


def of_script(source):
    """The names that a script defines, whose code a worker cannot import."""
    names = {"__name__": "__main__"}
    exec(compile(source, "script.py", "exec"), names)
    return names


@pytest.mark.filterwarnings("error::lockstep.errors.UnsplitBatchWarning")
def test_what_decorators_and_the_standard_library_make_is_sent():
    script = of_script((Path(__file__).parent / "script_of_everything.py").read_text())

    def build():
        layer = script["Everything"]()
        model = keras.Sequential([keras.Input((4, 6)), layer, layers.Dense(2)])
        model.compile("sgd", script["loss"])  # the layer has run, so that caches are filled
        return model

    one, many = both(build)
    rng = np.random.default_rng(1)
    for model in (one, many):
        model.fit(rng.normal(size=(16, 4, 6)), rng.normal(size=(16, 4, 2)), **QUIET)
        rng = np.random.default_rng(1)
    assert_equal(one, many)
    lockstep.release(many)


def test_a_value_that_a_cache_has_of_the_past_is_used():
    script = of_script(
        "import functools, keras\n"
        "factor = 2.0\n"
        "@functools.cache\n"
        "def scale(): return factor\n"
        "class Scales(keras.layers.Layer):\n"
        "    def call(self, x): return x * scale()\n"
    )

    def build():
        script["scale"].cache_clear()
        script["factor"] = 2.0
        made = sequential(script["Scales"]())
        script["factor"] = 3.0  # a worker computes with it
        return made

    assert_trains_equally(build)


def held():
    lock = threading.Lock()
    lock.acquire()
    return lock


def test_a_cached_function_has_its_attributes_in_a_worker():
    script = of_script(
        "import functools\n@functools.cache\ndef scale(k): return k * scale.factor\n"
    )
    script["scale"].factor = 0.5
    make, arguments, state = reduced(script["scale"])
    made = make(*arguments)
    assert state == {"factor": 0.5}
    vars(made).update(state)
    assert made.factor == 0.5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: threading.Thread(name="mine"), "'kept', an object of Thread: the thread 'mine' "),
        (held, "'kept', an object of lock: a held lock belongs"),
        (queue.SimpleQueue, "'kept', an object of SimpleQueue: cannot pickle"),
        (lambda: (n for n in "a"), "'kept', an object of generator: cannot pickle"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_name(make, words):
    script = of_script(
        "import keras\n"
        "kept = None\n"
        "def helper(x): return x if kept else None\n"
        "class Reads(keras.layers.Layer):\n"
        "    def call(self, x): return helper(x)\n"
    )
    script["kept"] = make()
    with pytest.raises(UnsupportedModel, match=words):
        dump(sequential(script["Reads"]()))


# ------------------------------------------------------------------- what code reads


def set_global(monkeypatch):
    monkeypatch.setattr(script_settings, "ALPHA", 3.0)


def set_in_a_dict(monkeypatch):
    monkeypatch.setitem(script_settings.OPTIONS, "scale", 0.5)


def set_in_an_object(monkeypatch):
    monkeypatch.setattr(script_settings.options, "scale", 0.5)


def set_on_a_class(monkeypatch):
    monkeypatch.setattr(script_settings.Scale, "factor", 2.0)


def replace_a_function(monkeypatch):
    monkeypatch.setattr(script_settings, "activation", ops.tanh)


def replace_a_partial(monkeypatch):
    monkeypatch.setattr(script_settings, "scaled", functools.partial(ops.multiply, 0.5))


def replace_a_method(monkeypatch):
    monkeypatch.setattr(script_settings.Scale, "shifted", lambda self, x: x - 0.5)


def replace_a_tensor(monkeypatch):
    monkeypatch.setattr(script_settings, "TABLE", ops.convert_to_tensor([0.5, -1.0, 2.0]))


def replace_a_function_of_keras(monkeypatch):
    plain = layers.LeakyReLU.call
    monkeypatch.setattr(layers.LeakyReLU, "call", lambda self, x: plain(self, x) * 0.5)


CHANGES = [
    *(set_global, set_in_a_dict, set_in_an_object, set_on_a_class, replace_a_function),
    *(replace_a_partial, replace_a_method, replace_a_tensor, replace_a_function_of_keras),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_script_sets_in_a_module_or_class_is_what_workers_have(change, monkeypatch):
    change(monkeypatch)
    assert_trains_equally(lambda: sequential(script_settings.Scale(), layers.LeakyReLU()))


@pytest.mark.parametrize("change", every(3, CHANGES))
def test_what_the_script_sets_between_two_fits_is_sent(change, monkeypatch):
    one, many = both(lambda: sequential(script_settings.Scale(), layers.LeakyReLU()))
    x, y = data()
    for model in (one, many):
        model.fit(x, y, **QUIET)
    change(monkeypatch)
    for model in (one, many):
        model.fit(x, y, **QUIET)
    assert_equal(one, many)
    monkeypatch.undo()
    for model in (one, many):
        model.fit(x, y, **QUIET)
    assert_equal(one, many)
    lockstep.release(many)


def script_of_closures():
    """A script within a function: its classes and functions travel by value."""
    positions = ops.convert_to_tensor(np.linspace(0.0, 1.0, 3))
    weight = keras.Variable(0.0, trainable=False)
    table = layers.Dense(3, use_bias=False)
    table.build((None, 3))
    settings = {"scale": 1.0}
    number = 1.0

    class Uses(layers.Layer):
        power = 1.0

        def call(self, x):
            y = table(x) * settings["scale"] * number + positions * self.power
            self.add_loss(weight * ops.sum(ops.square(y)))
            return y

    def anneal(step):
        nonlocal number
        weight.assign(0.01 * step)
        settings["scale"] = 1.0 + 0.1 * step
        Uses.power = 1.0 + 0.2 * step
        number = 1.0 - 0.1 * step

    return Uses, anneal, [table.kernel, weight]


class Anneals(keras.callbacks.Callback):
    def __init__(self, anneal, hook):
        super().__init__()
        self.step = 0
        setattr(self, hook, lambda number, logs=None: self.next_step(anneal))

    def next_step(self, anneal):
        self.step += 1
        anneal(self.step)


class AddsTerms(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        for layer in self.model.layers:
            if isinstance(layer, script_settings.Terms):
                layer.terms[f"b{batch % 2}"] = 0.1 * batch
                layer.terms.move_to_end("a")


def test_an_ordered_dict_an_enum_and_a_dict_by_names_are_what_they_are_here():
    """The first was empty for loops in a worker, and the others were errors."""
    assert_trains_equally(lambda: sequential(script_settings.Terms()), callbacks=[AddsTerms()])


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_train_batch_begin"])
def test_a_callback_changes_variables_and_globals_that_a_layer_reads(hook):
    found = []
    for devices in (1, 3):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(11)
        uses, anneal, others = script_of_closures()
        model = lockstep.distribute(sequential(uses()), devices)
        x, y = data()
        model.fit(x, y, epochs=3, callbacks=[Anneals(anneal, hook)], **QUIET)
        found.append([*values(model), *map(ops.convert_to_numpy, others)])
        lockstep.release(model)
    assert_equal(*found)


def test_a_generator_changes_a_global_within_an_epoch():
    found = []
    for devices in (1, 3):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(11)
        uses, anneal, _ = script_of_closures()
        model = lockstep.distribute(sequential(uses()), devices)

        def batches(anneal=anneal):
            x, y = data()
            for step in range(4):
                anneal(step)
                yield x[step : step + 7], y[step : step + 7]

        model.fit(batches(), steps_per_epoch=4, verbose=0, shuffle=False)
        found.append(values(model))
        lockstep.release(model)
    assert_equal(*found)


def test_two_models_whose_layers_are_of_one_class_keep_their_own_tensors():
    """A worker makes the class for each of them, so that its functions read the right copy."""
    found = []
    for devices in (1, 3):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(11)
        uses, anneal, _ = script_of_closures()
        first, second = (lockstep.distribute(sequential(uses()), devices) for _ in range(2))
        x, y = data()
        for step in range(3):
            first.fit(x, y, **QUIET)
            anneal(step)
            second.train_on_batch(x, y)
        found.append([*values(first), *values(second)])
        lockstep.release(first)
        lockstep.release(second)
    assert_equal(*found)


def test_two_models_whose_layers_read_a_tensor_of_one_module(monkeypatch):
    found = []
    for devices in (1, 3):
        monkeypatch.setattr(script_settings, "TABLE", ops.convert_to_tensor([0.5, -1.0, 2.0]))
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(11)
        models = [lockstep.distribute(sequential(script_settings.Scale()), devices) for _ in "ab"]
        x, y = data()
        for _ in range(3):
            for model in models:
                model.train_on_batch(x, y)
                script_settings.TABLE += 0.5
        found.append([*values(models[0]), *values(models[1])])
        for model in models:
            lockstep.release(model)
    assert_equal(*found)


STEPS = []


class NotesItsSteps(keras.Sequential):
    """Writes into a list of the script, which every process does by itself."""

    def train_step(self, data):
        STEPS.append(1)
        return super().train_step(data)


def test_what_a_step_changes_in_globals_is_not_sent_at_each_step(monkeypatch):
    sent = []
    send = pool.Pool.send
    monkeypatch.setattr(pool.Pool, "send", lambda self, *a: (sent.append(a[0]), send(self, *a)))
    STEPS.clear()
    model = NotesItsSteps([keras.Input((4,)), layers.Dense(2)])
    model.compile("sgd", "mse")
    lockstep.distribute(model, 3)
    x, y = data()
    model.fit(x, y, batch_size=2, verbose=0)
    assert len(STEPS) == 8
    assert sent.count("model") == 1
    lockstep.release(model)


# ------------------------------------------------------------------- the caller's own code


def test_the_code_of_the_caller_stays_the_same_objects():
    seen, calls = [], []
    table = layers.Dense(3, use_bias=False)
    table.build((None, 3))

    def helper(x):
        return table(x)

    class Uses(layers.Layer):
        def call(self, x):
            seen.append(1)
            return helper(x) * script_settings.ALPHA

    def loss(y, y_pred):
        calls.append(1)
        return ops.sum(ops.square(y - y_pred))

    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    def code():
        functions = [helper, loss, Uses.call, Own.train_step, script_settings.Scale.call]
        cells = [cell for each in functions for cell in each.__closure__ or ()]
        parts = [*functions, *cells, *(cell.cell_contents for cell in cells)]
        parts += [each.__globals__ for each in functions]
        for owner in (Uses, Own, script_settings, script_settings.Scale, layers.Dense):
            parts += [owner, *vars(owner).values()]
        return [*map(id, parts)], parts

    before, kept = code()
    for kind in (keras.Sequential, Own):
        model = kind([keras.Input((4,)), layers.Dense(3), Uses(), layers.Dense(2)])
        model.compile("sgd", loss)
        x, y = data()
        expected = ops.convert_to_numpy(model(x))
        lockstep.distribute(model, 3)
        assert_equal(model.predict(x, verbose=0), expected)
        model.fit(x, y, **QUIET)
        lockstep.release(model)
        assert code()[0] == before, kept
    seen.clear()
    model(x)
    assert seen == [1]


COUNT = [0]


class CountsInAGlobal(layers.Layer):
    """Its scale is the number of its calls, which a proof must not raise."""

    def call(self, x):
        COUNT[0] += 1
        return x * COUNT[0]


def test_a_proof_leaves_globals_as_they_are():
    found = []
    for devices in (1, 3):
        COUNT[0] = 0
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(11)
        model = lockstep.distribute(sequential(CountsInAGlobal()), devices)
        x, y = data()
        model.fit(x, y, **QUIET)
        found.append([COUNT[0], *values(model)])
        lockstep.release(model)
    assert_equal(*found)


# ------------------------------------------------------------------- the state of PyTorch


def in_autocast(model, x, y):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        model.predict(x, verbose=0)
        model.fit(x, y, epochs=3, **QUIET)
        return model.predict(x, verbose=0)


def in_one_autocast_for_each_step(model, x, y):
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            model.predict(x, verbose=0)
            model.train_on_batch(x, y)
        model.set_weights([weight * 2 for weight in model.get_weights()])
    with torch.autocast("cpu", torch.bfloat16):
        model.evaluate(x, y, batch_size=2, verbose=0)
        return model.predict(x, verbose=0)


@pytest.mark.parametrize("train", [in_autocast, in_one_autocast_for_each_step])
def test_workers_are_in_the_autocast_of_the_caller(train):
    """The inputs have few bits, so that products in bfloat16 are exact sums of exact terms."""

    def build():
        with_policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy("float32")
        try:
            model = keras.Sequential([keras.Input((4,)), layers.Dense(2, use_bias=False)])
        finally:
            keras.config.set_dtype_policy(with_policy)
        model.set_weights([np.array([[1.0, 1.01], [0.33, 2.0], [3.1, -1.0], [0.7, 0.5]])])
        model.compile(keras.optimizers.SGD(2.0**-6), "mse")
        return model

    one, many = both(build)
    x = np.eye(4, dtype="float32")[[0, 1, 2, 3, 2, 1, 0]]
    y = np.zeros((7, 2), "float32")
    outputs = [train(model, x, y) for model in (one, many)]
    np.testing.assert_allclose(*outputs, rtol=0, atol=1e-6)
    np.testing.assert_allclose(one.get_weights()[0], many.get_weights()[0], rtol=0, atol=1e-6)
    lockstep.release(many)


class StepOfItsOwn(keras.Sequential):
    def train_step(self, batch):
        return super().train_step(batch)


def test_an_autocast_that_has_casts_of_other_weights_is_refused():
    """PyTorch computes with them until its context ends: one device would train with old ones."""
    refused = functools.partial(
        pytest.raises, UnsupportedModel, match=r"Steps of .* run inside torch\.autocast"
    )
    model = lockstep.distribute(sequential(), 3)
    x, y = data()
    before = model.get_weights()
    with torch.autocast("cpu", torch.bfloat16):
        with refused():
            model.fit(x, y, **QUIET)
        for now, weight in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(now, weight)
        model.train_on_batch(x, y)
        for call in (model.train_on_batch, model.evaluate):
            with refused():
                call(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        model.evaluate(x, y, verbose=0)
        model.set_weights(before)
        with refused():
            model.predict(x, verbose=0)
    model.fit(x, y, **QUIET)
    lockstep.release(model)
    model = lockstep.distribute(StepOfItsOwn(sequential().layers), 3)
    model.compile("sgd", "mse")
    with torch.autocast("cpu", torch.bfloat16), refused():
        model.train_on_batch(x, y)  # it may update weights, and compute with them after
    lockstep.release(model)


# ------------------------------------------------------------------- layers of other kinds


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, dtype=torch.float64)
        self.norm = torch.nn.BatchNorm1d(3, dtype=torch.float64)

    def forward(self, x):
        return self.norm(torch.relu(self.linear(x)))


def test_a_module_of_pytorch_in_a_sequence():
    assert_trains_equally(lambda: sequential(layers.TorchModuleWrapper(Block())), epochs=2)


def integers():
    return layers.IntegerLookup(vocabulary=[10, 11, 12]), np.array([[10], [11], [12], [99]])


def adapted_integers():
    lookup = layers.IntegerLookup(output_mode="multi_hot")
    lookup.adapt(np.array([10, 11, 12]))
    return lookup, np.array([[10, 11], [11, 99], [12, 10], [99, 98]])


def bins():
    return layers.Discretization([11.0, 12.0], output_mode="multi_hot"), integers()[1]


@pytest.mark.parametrize("kind", [integers, adapted_integers, bins])
def test_a_lookup_layer_travels(kind):
    def build():
        lookup, x = kind()
        inputs = keras.Input(x.shape[1:], dtype="int64")
        hidden = lookup(inputs)
        if kind is integers:
            hidden = layers.Flatten()(layers.Embedding(5, 3)(hidden))
        model = keras.Model(inputs, layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    one, many = both(build)
    x = np.tile(kind()[1], (4, 1))
    y = np.arange(16.0)[:, None]
    for model in (one, many):
        model.fit(x, y, **QUIET)
    assert_equal(one, many)
    lockstep.release(many)


def test_the_calls_of_a_rank_are_stated_once():
    calls = {name for name, each in vars(Rank).items() if isinstance(each, Marked)}
    assert {"step", "whole_step", "take_values", "differing"} <= calls, "calls are seen"
    for peers in (Peers, NoPeers, PoolPeers, LauncherPeers):
        assert not calls & vars(peers).keys(), peers
