"""With sharded state each process has a part of each variable; the numbers are those of one."""

import contextlib
import copy
import gc
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import lockstep
from lockstep.engines.torch.ranks import pool
from lockstep.engines.torch.ranks.pool_peers import PoolPeers
from lockstep.engines.torch.sharded.sharded_variables import ShardedVariable, Shards, is_sharded
from lockstep.errors import LayoutConflict, UnsupportedModel, WorkerDied
from lockstep.keras_compat import stored_value
from tests.agreement import assert_equal, both
from tests.processes.common import script
from tests.tiers import further, rest
from tests.torch.test_on_failures import failing


@pytest.fixture(autouse=True)
def _small_variables_are_sharded(monkeypatch):
    monkeypatch.setattr(sys.modules["lockstep.core.devices"], "SHARDED_FROM", 0)


def mlp():
    return keras.Sequential(
        [
            keras.Input((13,)),
            keras.layers.Dense(
                37, "relu", kernel_regularizer="l2", kernel_constraint=keras.constraints.MaxNorm(1)
            ),
            keras.layers.Dense(11, "tanh"),
            keras.layers.Dense(3),
        ]
    )


def convolutions():
    layers = [
        keras.Input((8, 8, 2)),
        keras.layers.Conv2D(5, 3, use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.DepthwiseConv2D(3),
        keras.layers.Flatten(),
        keras.layers.Dense(3),
    ]
    return keras.Sequential(layers)


def transformer():
    tokens = keras.Input((6,), dtype="int32")
    embedding = keras.layers.ReversibleEmbedding(7, 8)
    x = embedding(tokens)
    x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 4)(x, x))
    x = x + keras.layers.EinsumDense("bti,io->bto", (None, 8))(x)
    return keras.Model(tokens, embedding(x, reverse=True))


def recurrent():
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(7, 5, mask_zero=True)(tokens)
    x = keras.layers.Bidirectional(keras.layers.GRU(4))(x)
    return keras.Model(tokens, keras.layers.Dense(3)(x))


def lora():
    model = keras.Sequential([keras.Input((13,)), *map(keras.layers.Dense, (37, 11, 3))])
    for layer in model.layers[:2]:
        layer.enable_lora(2)
        for variable in (layer.lora_kernel_a, layer.lora_kernel_b):  # Keras makes them in float32
            variable._dtype = "float64"
            variable._value = torch.nn.Parameter(variable._value.double())
        layer._track_variables()
    return model


MODELS = {made.__name__: made for made in (mlp, convolutions, transformer, recurrent, lora)}


def data(name, rows=31):
    draw = np.random.default_rng(5)
    if name == "convolutions":
        return draw.normal(size=(rows, 8, 8, 2)), draw.normal(size=(rows, 3))
    if name == "transformer":
        return draw.integers(1, 7, (rows, 6)), draw.integers(0, 7, (rows, 6))
    if name == "recurrent":
        return draw.integers(0, 7, (rows, 6)), draw.normal(size=(rows, 3))
    return draw.normal(size=(rows, 13)), draw.normal(size=(rows, 3))


optimizers = keras.optimizers
OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.05, momentum=0.9),
    "AdamW": lambda: optimizers.AdamW(0.01, amsgrad=True),
    "LAMB": lambda: optimizers.Lamb(0.01),
    "Muon": lambda: optimizers.Muon(0.01),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "global norm": lambda: optimizers.Adam(0.01, global_clipnorm=0.1),
    "norm": lambda: optimizers.SGD(0.05, clipnorm=0.1),
    "value": lambda: optimizers.SGD(0.05, clipvalue=0.01, weight_decay=0.01),
    "average": lambda: optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "accumulation, LAMB": lambda: optimizers.Lamb(0.01, gradient_accumulation_steps=2),
    "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=2.0**40),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "RMSprop": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "Adagrad": lambda: optimizers.Adagrad(0.05),
    "Adadelta": lambda: optimizers.Adadelta(0.5),
    "Lion": lambda: optimizers.Lion(0.001),
    "Ftrl": lambda: optimizers.Ftrl(0.05, l2_shrinkage_regularization_strength=0.01),
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.01),
}

SAMPLE = [
    *[("mlp", each) for each in OPTIMIZERS],
    *[(each, "AdamW") for each in MODELS],
    *[(each, "LAMB") for each in MODELS],
    *[(each, "Muon") for each in MODELS],
    *[(each, "global norm") for each in MODELS],
]
SAMPLE = list(dict.fromkeys(SAMPLE))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*SAMPLE[::4], *further(*(each for n, each in enumerate(SAMPLE) if n % 4))],
)
def test_training_equals_one_device(name, optimizer):
    def build():
        model = MODELS[name]()
        loss = "mse"
        if name == "transformer":
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(OPTIMIZERS[optimizer](), loss)
        return model

    one, many = both(build, state="sharded")
    x, y = data(name)
    logs = [
        model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0).history
        for model in (one, many)
    ]
    assert_equal(*logs)
    assert_equal(one, many)
    assert_equal(one.evaluate(x, y, verbose=0), many.evaluate(x, y, verbose=0))
    assert_equal(one.predict(x, verbose=0), many.predict(x, verbose=0))


def compiled():
    model = mlp()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def pair(devices=3):
    return both(compiled, devices, state="sharded")


def variables(model):
    return [*model.variables, *model.optimizer.variables]


def fit(model, rows=31, **options):
    x, y = data("mlp", rows)
    return model.fit(x, y, **{"batch_size": 10, "shuffle": False, "verbose": 0} | options)


def held(model):
    return sum(stored_value(variable).numel() for variable in variables(model))


def test_a_process_has_a_part_of_each_variable_after_any_call(tmp_path):
    one, many = pair()

    def assert_in_parts():
        kinds = {type(v) for v in [*many.trainable_variables, *many.optimizer.variables[2:]]}
        assert kinds == {ShardedVariable}
        assert held(many) <= held(one) // 3 + 2 * len(variables(many))
        registered = {id(tensor) for _, tensor in torch.nn.Module.named_parameters(many)}
        assert registered <= {id(stored_value(variable)) for variable in many.variables}

    for model in (one, many):
        fit(model)
    assert_in_parts()
    many.save(tmp_path / "a.keras")
    fit(many, validation_data=data("mlp", 7))
    many.load_weights(tmp_path / "a.keras")
    many.set_weights([value + 1 for value in many.get_weights()])
    one.set_weights([value + 1 for value in one.get_weights()])
    assert_in_parts()
    assert_equal(one.get_weights(), many.get_weights())
    for variable in variables(many):
        variable.assign(np.full(variable.shape, 3, variable.dtype))
        assert np.all(np.array(variable) == 3)
        assert (variable + 1).shape == variable.shape
    assert_in_parts()


def test_variables_below_64_kib_are_whole(monkeypatch):
    monkeypatch.undo()
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128), keras.layers.Dense(127)])
    model.compile(keras.optimizers.Adam(), "mse")
    lockstep.distribute(model, 3, state="sharded")
    kernel, *others = model.variables
    assert isinstance(kernel, ShardedVariable)
    assert stored_value(kernel).numel() == -(-64 * 128 // 3)
    assert [type(variable) for variable in others[:1]] == [keras.Variable]


def test_nobody_keeps_a_whole_value():
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    whole = [weakref.ref(variable.value) for variable in variables(model) if variable.ndim]
    lockstep.distribute(model, 3, state="sharded")
    gc.collect()
    assert [each() for each in whole] == [None] * len(whole)


class SizeOfKernel(keras.metrics.Mean):
    """A metric that reads a weight, which the first process alone computes."""

    def __init__(self, kernel, **kwargs):
        super().__init__(**kwargs)
        self.kernel = kernel

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(keras.ops.mean(keras.ops.abs(self.kernel)))


def test_a_metric_reads_whole_values():
    def build():
        model = mlp()
        metric = SizeOfKernel(model.layers[0].kernel, name="size")
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=[metric])
        return model

    one, many = both(build, state="sharded")
    assert_equal(fit(one).history, fit(many).history)
    assert_equal(one.evaluate(*data("mlp"), verbose=0), many.evaluate(*data("mlp"), verbose=0))


def test_verify_and_placement():
    model = compiled()
    found = lockstep.verify(model, data("mlp"), devices=3, steps=3, batch_size=10, state="sharded")
    assert found.verdict == "equal"
    lockstep.distribute(model, 3, state="sharded")
    assert "variables in shards" in str(lockstep.placement(model))


def test_files_and_copies_are_those_of_one_device(tmp_path):
    models = pair()
    for model, folder in zip(models, (tmp_path / "one", tmp_path / "many"), strict=True):
        folder.mkdir()
        fit(model, callbacks=[keras.callbacks.ModelCheckpoint(folder / "checkpoint.keras")])
        model.save_weights(folder / "some.weights.h5")
    one, many = models
    assert_equal(one, keras.models.load_model(tmp_path / "many" / "checkpoint.keras"))
    one.load_weights(tmp_path / "many" / "some.weights.h5")
    assert_equal(one.get_weights(), many.get_weights())
    for copied in (pickle.loads(pickle.dumps(many)), keras.models.clone_model(many)):
        assert {type(variable) for variable in copied.variables} == {keras.Variable}
    kernel = many.layers[0].kernel
    for copied in (pickle.loads(pickle.dumps(kernel)), copy.deepcopy(kernel), copy.copy(kernel)):
        assert type(copied) is keras.Variable
        assert_equal(copied.numpy(), kernel.numpy())


def test_a_model_moves_between_layouts_and_back_to_keras():
    one, many = pair()
    fit(one)
    fit(many)
    for devices, state in ((3, "replicated"), (2, "sharded"), (3, "sharded")):
        lockstep.distribute(many, devices, state=state)
        fit(one)
        fit(many)
    lockstep.release(many)
    assert {type(variable) for variable in variables(many)} == {keras.Variable}
    assert {id(p) for p in many.parameters()} <= {id(v.value) for v in many.variables}
    fit(one)
    fit(many)
    assert_equal(one, many)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((3, "sharded"), (2, "replicated")),
        ((2, "replicated"), (3, "sharded")),
        ((3, "sharded"), (2, "sharded")),
        ((3, "sharded"), (1, "replicated")),
    ],
)
def test_a_checkpoint_resumes_with_another_layout(tmp_path, first, second):
    one, _ = both(compiled)
    fit(one, epochs=2)
    for (devices, state), epochs in ((first, 1), (second, 2)):
        _, many = both(compiled, devices, state=state)
        fit(many, epochs=epochs, callbacks=[lockstep.Checkpoint(tmp_path / "run")])
    assert_equal(one, many)


@pytest.mark.parametrize("optimizer", ["Nadam", *rest("Adafactor")])
@pytest.mark.parametrize("verbose", [0, 2])
def test_a_checkpoint_resumes_however_the_optimizer_was_built(tmp_path, optimizer, verbose):
    def build():
        model = MODELS["mlp"]()
        model.compile(getattr(keras.optimizers, optimizer)(0.01), "mse")
        return model

    one, _ = both(build)
    fit(one, epochs=2)
    for state, epochs in (("sharded", 1), ("replicated", 2)):
        _, many = both(build, 2, state=state)
        callbacks = [lockstep.Checkpoint(tmp_path / "run")]
        fit(many, epochs=epochs, callbacks=callbacks, verbose=verbose)
    assert_equal(one, many)


def test_callbacks_and_calls_between_steps_see_whole_values():
    seen = []

    class Halves(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kernel = self.model.layers[0].kernel
            seen.append(kernel.numpy())
            kernel.assign(kernel * 0.5)

    one, many = pair()
    for model in (one, many):
        fit(model, callbacks=[Halves()])
        model.train_on_batch(*data("mlp", 5))
        seen.append(model(data("mlp", 4)[0]).detach().numpy())
    assert_equal(seen[: len(seen) // 2], seen[len(seen) // 2 :])
    assert_equal(one, many)


def test_a_model_that_is_built_and_compiled_later():
    def build():
        model = keras.Sequential([keras.layers.Dense(7, "relu"), keras.layers.Dense(3)])
        model.compile(keras.optimizers.Lamb(0.01), "mse")
        return model

    one, many = both(build, state="sharded")
    for model in (one, many):
        fit(model)
    assert isinstance(many.layers[0].kernel, ShardedVariable)
    (before,) = [slot for slot in many.optimizer.variables if "bias_momentum" in slot.path][:1]
    for model in (one, many):
        model.layers[1].trainable = False
        model.compile(keras.optimizers.Adam(0.01), "mae")
        model.train_on_batch(*data("mlp", 8))
        fit(model)
    assert_equal(one, many)
    with pytest.raises(UnsupportedModel, match="belonged to 'sequential' when its state"):
        before.numpy()
    lockstep.release(many)
    assert_equal(one, many)


def test_gradients_that_are_not_finite_in_one_part_alone_drop_the_step():
    def build():
        model = keras.Sequential([keras.Input((13,)), keras.layers.Dense(3)])
        inner = keras.optimizers.SGD(0.01)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**40)
        model.compile(optimizer, "mae")
        return model

    one, many = both(build, state="sharded")
    x, y = data("mlp", 12)
    x[:, 0] = 1e300  # the gradient of the first row of the kernel, which the first process has
    for model in (one, many):
        fit(model, 5)
        model.fit(x, y, verbose=0)
    assert float(many.optimizer.dynamic_scale) == 2.0**39
    assert_equal(one, many)


def test_another_thread_reads_variables_during_a_fit():
    one, many = pair()
    kernel, read, end = many.layers[0].kernel, [], threading.Event()

    def reads():
        while not end.is_set():
            read.append(kernel.numpy())

    thread = threading.Thread(target=reads)
    thread.start()
    fit(many, epochs=3)
    end.set()
    thread.join()
    fit(one, epochs=3)
    assert_equal(one, many)
    assert len(read) > 3
    assert {each.shape for each in read} == {(13, 37)}


def test_the_backward_pass_gathers_weights_again(monkeypatch):
    def build():
        layers = [keras.layers.Dense(37, "tanh", use_bias=False) for _ in range(7)]
        model = keras.Sequential([keras.Input((37,)), *layers])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    monkeypatch.setenv("LOCKSTEP_CHECK", "0")  # step 2 is compared again
    one, many = both(build, state="sharded")
    batch = np.random.default_rng(5).normal(size=(2, 10, 37))
    wholes, there = [], []

    def gathered(*args, _gathered=Shards.gathered):
        wholes.append(StorageWeakRef((whole := _gathered(*args)).untyped_storage()))
        for _ in range(200):  # the thread of a collective may hold one a moment longer
            alive = sum(not each.expired() for each in wholes)
            if alive <= 3:
                break
            time.sleep(0.01)
        there.append(alive)
        return whole

    monkeypatch.setattr(Shards, "gathered", gathered)
    for model in (one, many):
        for _ in range(2):
            wholes.clear()
            model.train_on_batch(*batch)
    # The backward pass begins with the two that are still there, and does not need the first one.
    assert len(wholes) == 7 + 4
    assert max(there) == 3  # two of them, and a new one
    assert_equal(one, many)


def pytorch_s_own(make):
    """A layer of the user's own, with four weights, out of a function of its input and weights."""

    @lockstep.rowwise
    class OwnLayer(keras.layers.Layer):
        def build(self, shape):
            size = shape[-1]
            self.weights_in_turn = [self.add_weight(shape=(size, size)) for _ in range(4)]

        def call(self, x):
            if x.device.type == "meta":
                return x
            return make(x, self.weights_in_turn)

        def compute_output_shape(self, shape):
            return shape

    return OwnLayer()


class OwnProduct(torch.autograd.Function):
    """Saves views of a weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight.T, weight[1:, ::2])
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight, view = ctx.saved_tensors
        assert torch.equal(view, weight.T[1:, ::2])
        return gradient @ weight, x.T @ gradient


def views(x, weights):
    for weight in weights:
        x = torch.tanh(OwnProduct.apply(x, weight.value))
    return x


def loop(x, weights):
    for _ in range(2):
        for weight in weights:
            x = torch.tanh(x @ weight.value.T) + x @ (2 * weight.value)
    with torch.no_grad():
        norm = weights[0].value.norm()
    return x / norm


def in_place(x, weights):
    for weight in weights:
        x = torch.relu_((x @ weight.value).add_(1)) * weight.value[0]
    return x


def second_derivative(x, weights):
    y = x
    for weight in weights:
        y = torch.tanh(y @ weight.value)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + gradient**2


def checkpoint(x, weights):
    return torch.utils.checkpoint.checkpoint(loop, x, weights, use_reentrant=False)


@pytest.mark.parametrize("make", [views, loop, in_place, second_derivative, checkpoint])
def test_code_in_pytorch_uses_weights_as_on_one_device(make):
    def build():
        layers = [keras.layers.Dense(13), pytorch_s_own(make), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((13,)), *layers])
        model.compile(keras.optimizers.AdamW(0.01), "mse")
        return model

    one, many = both(build, state="sharded")
    assert_equal(fit(one).history, fit(many).history)
    assert_equal(one, many)
    assert {type(variable) for variable in many.layers[1].variables} == {ShardedVariable}


def writes_a_saved_tensor(x, weights):
    y = torch.tanh(x @ weights[0].value)
    y.mul_(2)
    return y


def writes_a_part(x, weights):
    y = views(x, weights)
    with torch.no_grad():
        stored_value(weights[0]).mul_(2)
    return y


def writes_a_value(x, weights):
    value = weights[0].value
    y = views(x, weights)
    with torch.no_grad():
        value.mul_(2)
    return y


def takes_a_function_s_gradient(x, weights):
    value = weights[0].value
    return torch.func.grad(lambda x: (x @ value).sum())(x)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (writes_a_value, UnsupportedModel, "A step writes into the value of"),
        *further(
            (writes_a_saved_tensor, RuntimeError, "modified by an inplace operation"),
            (writes_a_part, UnsupportedModel, "was changed in place"),
            (takes_a_function_s_gradient, UnsupportedModel, "computes derivatives with torch.func"),
        ),
    ],
)
def test_code_that_would_get_wrong_gradients_is_refused(monkeypatch, make, error, words):
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")  # the comparison with one device would see it first
    model = keras.Sequential([keras.Input((13,)), pytorch_s_own(make), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    lockstep.distribute(model, 3, state="sharded")
    with pytest.raises(error, match=words):
        fit(model)


@pytest.mark.thorough
def test_an_autocast_that_lasts_several_steps_is_refused():
    """PyTorch would compute with casts of the weights from before the first of them."""
    _, many = pair()
    x, y = data("mlp", 10)
    for cache in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            many.train_on_batch(x, y)
            if not cache:
                many.train_on_batch(x, y)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(UnsupportedModel, match=r"Steps of .* run inside torch\.autocast"),
    ):
        fit(many)
    fit(many)


def test_a_backward_pass_after_its_step_is_refused():
    kept = []

    def keep(x, weights):
        kept.append(views(x, weights))
        return views(x, weights)

    model = keras.Sequential([keras.Input((13,)), pytorch_s_own(keep), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    lockstep.distribute(model, 3, state="sharded")
    fit(model, rows=10)
    with pytest.raises(UnsupportedModel, match="A custom backward pass reaches"):
        kept[-1].sum().backward()


class Scaled(keras.layers.Layer):
    """A layer of the user's own, which a first step compares with one device."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x):
        return x * self.scale


def test_a_layer_of_ones_own_is_compared_in_a_first_step():
    def build():
        model = keras.Sequential([keras.Input((13,)), keras.layers.Dense(7), Scaled()])
        model.add(keras.layers.Dense(3))
        model.layers[0].trainable = False
        model.compile(keras.optimizers.AdamW(0.01), "mse")
        return model

    one, many = both(build, state="sharded")
    for model in (one, many):
        fit(model)
    assert_equal(one, many)
    assert isinstance(many.layers[1].scale, ShardedVariable)


def test_a_gathered_value_cannot_be_written_in_place():
    _, many = pair()
    kernel = many.layers[0].kernel
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"), torch.no_grad():
        kernel.value.mul_(2)
    loss = keras.ops.sum(many(data("mlp", 4)[0]))
    with pytest.raises(UnsupportedModel, match="A custom backward pass reaches"):
        loss.backward()


def test_pytorch_s_own_methods_are_refused_and_what_they_write_is_noticed():
    def build():
        model = mlp()
        model.compile("sgd", "mse")
        return model

    one, many = both(build)
    lockstep.distribute(lockstep.release(many), 3, state="sharded")
    x, y = data("mlp")
    for call in (
        lambda: list(many.parameters()),
        lambda: torch.optim.SGD(many.named_parameters()),
        many.state_dict,
        lambda: list(many.layers[0].parameters()),
        many.layers[0].state_dict,
        torch.nn.ModuleDict({"model": many}).state_dict,
        lambda: torch.optim.swa_utils.AveragedModel(one).update_parameters(many),
        lambda: many.load_state_dict(one.state_dict()),
    ):
        with pytest.raises(UnsupportedModel, match="state is sharded"):
            call()
    many.fit(x, y, batch_size=7, verbose=0, shuffle=False)
    one.fit(x, y, batch_size=7, verbose=0, shuffle=False)
    with torch.no_grad():
        for _, parameter in torch.nn.Module.named_parameters(many.layers[0]):  # around the guard
            parameter.mul_(0.5)
    for call in (many.get_weights, lambda: many.fit(x, y, verbose=0)):
        with pytest.raises(UnsupportedModel, match="was changed in place"):
            call()
    many.set_weights(one.get_weights())
    for model in (one, many):
        model.fit(x, y, batch_size=7, verbose=0, shuffle=False)
    assert_equal(one, many)
    lockstep.release(many)
    assert len(many.state_dict()) == len(one.state_dict())


@pytest.mark.whole
def test_a_model_trains_in_shards_that_is_too_large_for_a_process():
    def run(state):
        settings = {"LOCKSTEP_REHEARSE": "4", "MALLOC_MMAP_THRESHOLD_": "1000000"}
        file = Path(__file__).with_name("limited_memory.py")
        settings["PYTHONPATH"] = os.pathsep.join(sys.path)
        said = script(file, state, KERAS_BACKEND="torch", **settings)
        return said.splitlines()[-1]

    assert "allocate" in run("replicated")
    assert float(run("sharded")) == pytest.approx(float(run("alone")), rel=1e-5)


class Twice(keras.layers.Layer):
    """Has one value in two variables."""

    def __init__(self, make=keras.ops.convert_to_tensor):
        super().__init__()
        self._make = make

    def build(self, shape):
        self.first = self.add_weight(shape=(shape[-1], shape[-1]), name="first")
        self.second = self.add_weight(
            shape=(shape[-1], shape[-1]), name="second", initializer=self._of_first
        )

    def _of_first(self, shape, dtype=None):
        return self._make(self.first)

    def call(self, x):
        return x @ self.first @ self.second


def test_variables_that_share_their_memory_are_refused():
    model = keras.Sequential([keras.Input((13,)), Twice(), keras.layers.Dense(3)])
    before = model.get_weights()
    with pytest.raises(UnsupportedModel, match="such as in another"):
        lockstep.distribute(model, 3, state="sharded")
    assert_equal(before, model.get_weights())


def test_a_variable_made_of_a_view_of_another_one_is_refused_in_shards():
    with (
        pytest.raises(UnsupportedModel, match="Create the variable from a copy"),
        lockstep.sharded(3),
    ):
        keras.Sequential([keras.Input((13,)), Twice(keras.ops.transpose)])
    with pytest.raises(RuntimeError, match="Inplace update"), lockstep.sharded(3):
        mlp().layers[0].kernel.value.mul_(2)
    with lockstep.sharded(3):
        twice = Twice(lambda value: keras.ops.copy(keras.ops.transpose(value)))
        keras.Sequential([keras.Input((13,)), twice])
    assert_equal(twice.first.numpy().T, twice.second.numpy())


def test_statistics_adapted_in_shards_are_those_of_one_device(monkeypatch):
    monkeypatch.setattr(sys.modules["lockstep.core.devices"], "SHARDED_FROM", 16)
    x = np.random.default_rng(0).normal(size=(8, 5, 7))

    def build():
        normalization = keras.layers.Normalization(axis=(1, 2))
        normalization.adapt(x)
        layers = [keras.Input((5, 7)), normalization, keras.layers.Flatten()]
        made = keras.Sequential([*layers, keras.layers.Dense(3)])
        made.compile("adam", "mse")
        return made

    keras.utils.set_random_seed(11)
    one = build()
    keras.utils.set_random_seed(11)
    with lockstep.sharded(3):
        many = build()
    lockstep.distribute(many, 3, state="sharded")
    for model in (one, many):
        model.fit(x, np.ones((8, 3)), batch_size=3, epochs=2, verbose=0, shuffle=False)
    assert_equal(one, many)


class Writes(keras.layers.Dense):
    """Writes into its weight in place."""

    def call(self, x):
        with torch.no_grad():
            self.kernel.value.mul_(2)
        return super().call(x)


class Assigns(keras.layers.Dense):
    """Assigns to its weight."""

    def call(self, x):
        self.kernel.assign(self.kernel * 0.9)
        return super().call(x)


class MyAdam(keras.optimizers.Adam):
    """Looks at the whole variable."""

    def update_step(self, gradient, variable, learning_rate):
        size = keras.ops.max(keras.ops.abs(variable), axis=-1, keepdims=True)
        super().update_step(gradient * size, variable, learning_rate)


class MyApply(keras.optimizers.Adam):
    """Has an update of its own for all variables."""

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)


class MySlotless(keras.optimizers.SGD):
    """Has an update of its own, and no slots."""

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)


def test_an_update_step_of_ones_own_sees_whole_variables():
    def build():
        model = mlp()
        model.compile(MyAdam(0.01), "mse")
        return model

    one, many = both(build, state="sharded")
    for model in (one, many):
        fit(model)
    assert_equal(one, many)


class MyStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def of_ones_own(optimizer="adam", kind=keras.Sequential, layer=keras.layers.Dense):
    model = kind([keras.Input((13,)), layer(3)])
    model.compile(optimizer, "mse")
    return lockstep.distribute(model, 3, state="sharded")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: of_ones_own(MyApply()), "is MyApply, with its own apply, which is not known"),
        (lambda: of_ones_own(MySlotless(0.1)), "is MySlotless, with its own apply, which"),
        (lambda: of_ones_own(kind=MyStep), "has a train_step of its own"),
        (lambda: of_ones_own(layer=Assigns), "A step assigns to 'sequential.*/kernel'"),
        (lambda: of_ones_own(layer=Writes), "A step assigns to 'sequential.*/kernel'"),
    ],
)
def test_what_is_not_known_to_be_exact_is_refused(make, words):
    with pytest.raises(UnsupportedModel, match=words) as refused:
        fit(make())
    assert str(refused.value).count("\n") == 2


def test_a_variable_has_parts_for_one_model():
    _, many = pair()
    other = keras.Sequential([keras.Input((13,)), many.layers[0]])
    assert_equal(other.predict(data("mlp")[0], verbose=0), other(data("mlp")[0]).detach())
    for state, remedy in (("replicated", "the same devices"), ("sharded", "models replicated")):
        with pytest.raises(LayoutConflict, match=f"with state in shards.\n.*{remedy}"):
            lockstep.distribute(other, 3, state=state)
    lockstep.release(many)
    lockstep.distribute(other, 3)
    lockstep.distribute(many, 3, state="sharded")
    with pytest.raises(UnsupportedModel, match="shares variables with another model"):
        other.predict(data("mlp")[0], verbose=0)
    fit(many)


@pytest.mark.thorough
def test_the_parts_of_a_killed_process_are_lost():
    _, many = pair(2)
    fit(many)
    worker = pool._pools["cpu:0", "cpu:1"]._workers[0].process
    os.kill(worker.pid, signal.SIGKILL)
    for call in (lambda: fit(many), many.get_weights, lambda: many.layers[0].kernel.numpy()):
        with pytest.raises(WorkerDied, match="is lost: its state was sharded") as died:
            call()
        assert "lockstep.Checkpoint" in str(died.value)
    one, again = pair(2)
    fit(one)
    fit(again)
    assert_equal(one, again)


def test_a_signal_waits_for_the_end_of_a_step():
    one, many = pair()
    fit(many, rows=10)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        fit(many, rows=10, epochs=1000)
    fit(one, rows=10, epochs=int(many.optimizer.iterations))
    assert_equal(one, many)


def test_an_error_in_a_step_says_that_the_model_is_lost():
    _, many = both(failing("raise", 3), 2, state="sharded")
    with pytest.raises(KeyError, match="no such thing") as caught:
        many.fit(np.ones((31, 4)), np.ones((31, 2)), batch_size=4, verbose=0)
    assert "is lost: its state was sharded" in caught.value.__notes__[-1]
    with pytest.raises(WorkerDied, match="is lost"):
        many.get_weights()


def test_the_first_line_of_fit_gives_the_state_of_a_device(capsys):
    _, many = pair()
    fit(many, verbose=2)
    assert ", state sharded: 0.0 of 0.0 MB each\n" in capsys.readouterr().out


def on_device(model):
    """The elements that this process has on its device, of weights and slots in parts."""
    return sum(stored_value(each).numel() for each in variables(model) if is_sharded(each))


@pytest.mark.parametrize(("name", "optimizer"), [("mlp", "AdamW"), ("recurrent", "LAMB")])
def test_a_model_is_built_and_loaded_in_shards(name, optimizer, tmp_path):
    def build():
        model = MODELS[name]()
        model.compile(OPTIMIZERS[optimizer](), "mse")
        return model

    one, _ = both(build)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(11)
    with lockstep.sharded(3):
        many = build()
    assert on_device(many) == 0
    assert all(map(np.array_equal, one.get_weights(), many.get_weights()))
    x, y = data(name)
    assert_equal(one.predict(x, verbose=0), many.predict(x, verbose=0))
    lockstep.distribute(many, 3, state="sharded")
    assert all(map(np.array_equal, one.get_weights(), many.get_weights()))
    assert 0 < on_device(many) < one.count_params() / 2
    options = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
    assert_equal(*[model.fit(x, y, **options).history for model in (one, many)])
    one.save(tmp_path / "one.keras")
    with lockstep.sharded(3):
        loaded = keras.models.load_model(tmp_path / "one.keras")
        loaded.load_weights(tmp_path / "one.keras")
    assert on_device(loaded) == 0
    loaded.layers[-1].bias.assign(one.layers[-1].bias)
    loaded.set_weights(many.get_weights())
    for devices, state in ((2, "replicated"), (2, "sharded")):  # none of the context
        lockstep.distribute(loaded, devices, state=state)
        assert_equal(*[model.fit(x, y, **options).history for model in (one, loaded)])
    lockstep.release(loaded)
    assert {type(variable) for variable in variables(loaded)} == {keras.Variable}
    assert_equal(one.get_weights(), loaded.get_weights())


def test_a_model_in_shards_that_is_not_distributed(monkeypatch):
    with lockstep.sharded(3):
        model = compiled()
        kernel = keras.Variable(np.ones((40, 3)))  # Keras has the array whole
    assert type(kernel) is keras.Variable
    before = model.get_weights()
    with pytest.raises(UnsupportedModel, match="which was made in lockstep"):
        fit(model)
    for value in (model.layers[0].kernel.value, model.layers[0].kernel.numpy()):
        with contextlib.suppress(RuntimeError):
            value *= 2  # a copy
    monkeypatch.setattr(PoolPeers, "_compare_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lockstep.distribute(model, 3, state="sharded")
    assert_equal(before, model.get_weights())
    assert on_device(model) == 0
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert {type(variable) for variable in copied.variables} == {keras.Variable}
    monkeypatch.undo()
    lockstep.release(model)
    lockstep.distribute(model, 1)
    assert {type(variable) for variable in model.variables} == {keras.Variable}
    assert_equal(before, model.get_weights())


def interrupted(*_):
    raise KeyboardInterrupt
