"""Sharded state on PyTorch: gathers, code in PyTorch, the memory of processes, and their faults."""

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
from lockstep.errors import UnsupportedModel, WorkerDied
from lockstep.keras_compat import stored_value
from tests.agreement import assert_equal, both
from tests.every_backend.sharded_models import compiled, data, fit, held, mlp, pair, variables
from tests.processes.common import script
from tests.tiers import further
from tests.torch.test_on_failures import failing


@pytest.fixture(autouse=True)
def _small_variables_are_sharded(monkeypatch):
    monkeypatch.setattr(sys.modules["lockstep.core.devices"], "SHARDED_FROM", 0)


def test_nobody_keeps_a_whole_value():
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    whole = [weakref.ref(variable.value) for variable in variables(model) if variable.ndim]
    lockstep.distribute(model, 3, state="sharded")
    gc.collect()
    assert [each() for each in whole] == [None] * len(whole)


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


def test_code_in_pytorch_uses_weights_as_on_one_device():
    made = views, loop, in_place, second_derivative, checkpoint

    def build():
        inputs = keras.Input((13,))
        x = keras.layers.Dense(13)(inputs)
        unit = keras.layers.UnitNormalization()
        x = keras.layers.add([unit(pytorch_s_own(make)(x)) for make in made])
        model = keras.Model(inputs, keras.layers.Dense(3)(x))
        model.compile(keras.optimizers.AdamW(0.01), "mse")
        return model

    one, many = pair(build)
    assert_equal(fit(one), fit(many))
    assert_equal(one, many)
    assert {type(variable) for variable in many.layers[2].variables} == {ShardedVariable}


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
    x, y = data(rows=10)
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


def test_a_gathered_value_cannot_be_written_in_place():
    _, many = pair()
    kernel = many.layers[0].kernel
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"), torch.no_grad():
        kernel.value.mul_(2)
    loss = keras.ops.sum(many(data(rows=4)[0]))
    with pytest.raises(UnsupportedModel, match="A custom backward pass reaches"):
        loss.backward()


def test_pytorch_s_own_methods_are_refused_and_what_they_write_is_noticed():
    def build():
        model = mlp()
        model.compile("sgd", "mse")
        return model

    one, many = both(build)
    lockstep.distribute(lockstep.release(many), 3, state="sharded")
    x, y = data()
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


class MyApply(keras.optimizers.Adam):
    """Has an update of its own for all variables."""

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)


class MySlotless(keras.optimizers.SGD):
    """Has an update of its own, and no slots."""

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)


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
        *further((lambda: of_ones_own(layer=Writes), "A step assigns to 'sequential.*/kernel'")),
    ],
)
def test_what_is_not_known_to_be_exact_is_refused(make, words):
    with pytest.raises(UnsupportedModel, match=words) as refused:
        fit(make())
    assert str(refused.value).count("\n") == 2


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
    assert held(v for v in model.variables if is_sharded(v)) == [0]
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert {type(variable) for variable in copied.variables} == {keras.Variable}
    monkeypatch.undo()
    lockstep.release(model)
    lockstep.distribute(model, 1)
    assert {type(variable) for variable in model.variables} == {keras.Variable}
    assert_equal(before, model.get_weights())


def interrupted(*_):
    raise KeyboardInterrupt
