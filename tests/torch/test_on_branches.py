"""Branches on devices that PyTorch can tell apart: what is where, and the numbers of one device."""

import copy
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import torch
from keras import layers

import lockstep
from lockstep.attach.attachment import attach, session_of
from lockstep.engines.torch.branches import branch_session
from lockstep.errors import UnsupportedBackend, UnsupportedModel
from lockstep.processes import process_group
from tests.agreement import BOUND
from tests.every_backend.branch_models import (
    chain,
    config_in,
    data,
    rows,
    train,
    two_branches,
    two_branches_apart,
)
from tests.torch.simulated_gpus import simulated_gpus

GPUS = ("gpu:0", "gpu:1", "gpu:2")
APART = {"dense_[024]": "gpu:0", "dense_[135]": "gpu:1"}
RESIDUAL = {"dense_0": "gpu:1", "dense_1": "gpu:2", "norm": "gpu:1", "head": "gpu:0"}
pytestmark = pytest.mark.filterwarnings("ignore::lockstep.errors.SerialBranchesWarning")


@pytest.fixture
def gpus():
    with simulated_gpus() as simulation:
        yield simulation


def assert_equal_runs(one, many):
    for mine, theirs in zip(many.values(), one.values(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=BOUND)


def device_of(variable):
    return str(variable.value.device).replace("lazy", "gpu")


def once(build):
    """What one device leaves, by Keras alone."""
    keras.utils.clear_session(free_memory=False)
    return train(build(), *rows())


def placed(build, places=APART):
    keras.utils.clear_session(free_memory=False)
    return train(lockstep.place(build(), places), *rows())


def test_the_devices_are_apart(gpus):
    one, other = (torch.ones(2, device=f"lazy:{number}") for number in (0, 1))
    with pytest.raises(RuntimeError, match=r"tensors of \['lazy:0', 'lazy:1'\]"):
        one + other
    weight = torch.nn.Parameter(one)
    (2 * weight.to("lazy:1") * other).sum().backward()
    assert str(weight.grad.device) == "lazy:0"
    np.testing.assert_array_equal(weight.grad.cpu().numpy(), [2, 2])


def residual():
    keras.utils.set_random_seed(3)
    model = Residual()
    model(np.ones((1, 4)))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.optimizer.build(model.trainable_variables[: len(model.trainable_variables) // 2])
    model.other = keras.optimizers.Adam(0.02)
    return model


@pytest.mark.parametrize(
    ("part", "build", "places"),
    [("updates_at_home", chain, APART), ("mixed_devices", lambda: residual(), RESIDUAL)],
    ids=["updates", "mixed"],
)
def test_without_a_part_of_the_engine_pytorch_refuses(gpus, monkeypatch, part, build, places):
    monkeypatch.setattr(branch_session, part, lambda *_: nullcontext())
    with pytest.raises(RuntimeError, match="has tensors of"):
        placed(build, places)


def test_the_old_recipe_with_dropout():
    x, y = data()
    one = train(two_branches(), x, y)
    with simulated_gpus() as gpus:
        model = two_branches(GPUS)
        many = train(model, x, y)
        for variable in [*model.trainable_variables, *model.optimizer.variables]:
            for layer, home in zip(("shared", "second", "head"), GPUS, strict=True):
                assert layer not in variable.path or device_of(variable) == home, variable.path
        gpus.operations.clear()
        model.predict(x, verbose=0)
        products = {
            name: sum(there.get(each, 0) for each in ("mm", "bmm", "addmm"))
            for name, there in gpus.operations.items()
        }
    assert_equal_runs(one, many)
    assert products.get("cpu", 0) == 0
    assert products["lazy:2"] == 1  # the head
    assert products["lazy:1"] == products["lazy:0"] + 1 > 5  # five steps of the LSTM, and a Dense


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.Nadam(0.01, weight_decay=0.1),
        keras.optimizers.Adam(0.01, global_clipnorm=0.05, use_ema=True, ema_momentum=0.5),
        keras.optimizers.AdamW(0.01, clipnorm=0.05, gradient_accumulation_steps=2),
        keras.optimizers.Adafactor(0.01),
        keras.optimizers.Ftrl(0.01, clipvalue=0.01),
        keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.9, nesterov=True
        ),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion(0.01), initial_scale=8.0),
    ],
    ids=lambda optimizer: optimizer.name,
)
def test_optimizers(optimizer):
    config = keras.optimizers.serialize(optimizer)

    def build():
        model = chain()
        model.layers[1].kernel_regularizer = keras.regularizers.L1L2(0.01, 0.01)
        model.layers[1].kernel.regularizer = model.layers[1].kernel_regularizer
        model.layers[3].kernel.constraint = keras.constraints.MaxNorm(0.5)
        model.compile(keras.optimizers.deserialize(copy.deepcopy(config)), "mse", metrics=["mae"])
        return model

    one = once(build)
    with simulated_gpus():
        assert_equal_runs(one, placed(build))


class Total(keras.optimizers.SGD):
    """Each update depends on those before, of any device."""

    def build(self, variables):
        super().build(variables)
        self.total = self.add_variable((), name="total")

    def update_step(self, gradient, variable, learning_rate):
        self.total.assign_add(keras.ops.sum(keras.ops.abs(gradient)))
        variable.assign_sub(learning_rate * gradient / (1 + self.total))


def test_an_optimizer_that_keeps_a_number_of_all_variables():
    def build():
        model = chain()
        model.compile(Total(0.1), "mse")
        return model

    one = once(build)
    with simulated_gpus():
        assert_equal_runs(one, placed(build))


class Residual(keras.Model):
    """Operators of Python on tensors of two devices, a step and an optimizer of the model's own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(4, name="dense_0"), layers.Dense(4, name="dense_1")
        self.norm = layers.BatchNormalization(name="norm")
        self.head = layers.Dense(8, name="head")
        self.scale = self.add_weight((4,), initializer="ones", name="scale")

    def call(self, x):
        x = x + self.scale * self.first(x)
        x = x + self.norm(self.second(x))
        return self.head(self.norm(x))

    def train_step(self, batch):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        loss.backward()
        variables = self.trainable_variables
        gradients = [variable.value.grad for variable in variables]
        half = len(gradients) // 2
        with torch.no_grad():
            self.optimizer.apply(gradients[:half], variables[:half])
            self.other.apply(gradients[half:], variables[half:])
        return self.compute_metrics(x, y, None)


def test_a_subclassed_model_with_its_own_step_and_two_optimizers():
    one = once(residual)
    with simulated_gpus():
        many = placed(
            residual, {"dense_0": "gpu:1", "dense_1": "gpu:2", "norm": "gpu:1", "head": 0}
        )
        assert_equal_runs(one, many)


def test_other_optimizers_go_with_the_model():
    def run(*changes):
        keras.utils.clear_session(free_memory=False)
        model, found = residual(), []
        for change in changes:
            change(model)
            found.append(train(model, *rows()))
        return found

    one = run(id, id, id)
    with simulated_gpus():
        many = run(id, lambda model: lockstep.place(model, RESIDUAL), lockstep.release)
        for mine, theirs in zip(many, one, strict=True):
            assert_equal_runs(theirs, mine)


def test_towers_whose_layers_have_the_same_names():
    def build(places=(nullcontext, nullcontext)):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        inputs, encoded = keras.Input((4,)), []
        for place in places:
            one = keras.Input((4,))
            with place():
                tower = keras.Model(one, layers.Dense(4, name="tower")(one))
            encoded.append(tower(inputs))
        model = keras.Model(inputs, layers.Dense(8)(layers.concatenate(encoded)))
        model.compile("adam", "mse")
        return model

    one = train(build(), *rows())
    with simulated_gpus():
        places = [lambda: lockstep.on("gpu:1"), lambda: lockstep.on("gpu:2")]
        assert_equal_runs(one, train(build(places), *rows()))


def test_nested_models_and_a_shared_one_with_statistics():
    def build(devices=None):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        on = [nullcontext()] * 2 if devices is None else [lockstep.on(each) for each in devices]
        tower = keras.Sequential(
            [keras.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.2)]
        )
        inputs = keras.Input((4,))
        with on[0]:
            a = tower(inputs)
        with on[1]:
            b = tower(layers.Dense(4, activity_regularizer="l1")(inputs))
        model = keras.Model(inputs, [layers.add([a, b]), layers.Dense(8)(b)])
        model.compile("adam", "mse", metrics=["mae", "mae"])
        return model

    x, y = rows()
    one = train(build(), x, [y, y])
    with simulated_gpus():
        assert_equal_runs(one, train(build(("gpu:1", "gpu:2")), x, [y, y]))


def test_a_direct_call_a_file_and_a_released_model(gpus, tmp_path):
    x, y = data()
    model = two_branches(GPUS)
    model.fit(x, y, verbose=0)
    before = model.predict(x, verbose=0)
    outputs = model([torch.as_tensor(each) for each in x])
    assert str(outputs.device) == "lazy:2"
    np.testing.assert_allclose(keras.ops.convert_to_numpy(outputs), before, atol=BOUND)
    model.save(tmp_path / "placed.keras")
    assert "gpu" not in str(config_in(tmp_path / "placed.keras"))
    loaded = keras.models.load_model(tmp_path / "placed.keras")
    assert {device_of(variable) for variable in loaded.variables} == {"gpu:0"}
    np.testing.assert_allclose(loaded.predict(x, verbose=0), before, atol=BOUND)
    lockstep.release(model)
    every = [*model.variables, *model.optimizer.variables]
    assert {device_of(variable) for variable in every} == {"gpu:0"}
    assert not [layer for layer in model._flatten_layers() if "call" in vars(layer)]
    np.testing.assert_allclose(model.predict(x, verbose=0), before, atol=BOUND)
    model.fit(x, y, verbose=0)


def test_a_failure_leaves_the_model_as_it_was(gpus, monkeypatch):
    model = chain()
    attributes, methods = set(vars(model)), [dict(vars(layer)) for layer in model.layers]

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lockstep.attach.attachment._put_on", fail)
    with pytest.raises(KeyboardInterrupt):
        lockstep.place(model, APART)
    monkeypatch.undo()
    assert set(vars(model)) == attributes
    assert [dict(vars(layer)) for layer in model.layers] == methods
    assert {str(variable.value.device) for variable in model.variables} == {"lazy:0"}


def test_what_is_made_of_placed_layers(gpus):
    model = lockstep.place(two_branches_apart(), {"left": 0, "right": 1})
    x, y = data()
    model.fit(x, y, verbose=0)
    homes = {v.path.split("/")[0]: device_of(v) for v in model.trainable_variables}
    assert {homes["left"], homes["right"]} == {"gpu:0", "gpu:1"}
    features = keras.Model(model.inputs, model.get_layer("right").output)
    gpus.operations.clear()
    features.predict(x, verbose=0)
    assert {name for name, there in gpus.operations.items() if "mm" in there} == {
        homes["right"].replace("gpu", "lazy")
    }
    grown = lockstep.place(chain(4), {"dense_0": 1, "dense_1": 1, "dense_[23]": 2})
    grown.add(layers.Dense(3, name="new"))
    grown.compile("adam", "mse")
    grown.fit(rows()[0], np.zeros((22, 3)), verbose=0)


def test_a_model_around_one_that_is_placed(gpus):
    model = lockstep.place(chain(2), {"dense_0": 2, "dense_1": 1})
    around = keras.Sequential([model, layers.Dense(3, name="new")])
    around.compile("adam", "mse")
    lockstep.place(around, {"new": 0})
    around.fit(rows()[0], np.zeros((22, 3)), verbose=0)
    homes = [device_of(layer.kernel) for layer in (*model.layers, around.get_layer("new"))]
    assert homes == ["gpu:2", "gpu:1", "gpu:0"]


def test_compilation_by_pytorch_is_refused():
    model = lockstep.place(chain(), {"dense_1": 1})
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(UnsupportedModel, match="jit_compile=True does not support"):
        model.fit(*rows(), verbose=0)


def test_several_processes_are_refused(monkeypatch):
    engine = lockstep.engines.current_engine()
    layout = session_of(lockstep.place(chain(), {"dense_1": 1})).layout
    monkeypatch.setattr(process_group, "several", lambda: True)
    said = r"several processes are running.\nStart one process"
    with pytest.raises(UnsupportedBackend, match=said):
        attach(engine, chain(), layout)
