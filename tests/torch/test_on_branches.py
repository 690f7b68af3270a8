"""Branches on PyTorch: what its engine adds, steps of the user, and two optimizers."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
import torch
from keras import layers

import lockstep
from lockstep.attach.attachment import attach, session_of
from lockstep.engines.torch.branches import branch_session
from lockstep.errors import UnsupportedBackend
from lockstep.processes import process_group
from tests.every_backend.branch_models import assert_equal_runs, chain, rows, train
from tests.torch.simulated_gpus import simulated_gpus

APART = {"dense_[024]": "gpu:0", "dense_[135]": "gpu:1"}
RESIDUAL = {"dense_0": "gpu:1", "dense_1": "gpu:2", "norm": "gpu:1", "head": "gpu:0"}
pytestmark = pytest.mark.filterwarnings("ignore::lockstep.errors.SerialBranchesWarning")


@pytest.fixture
def gpus():
    with simulated_gpus() as simulation:
        yield simulation


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


def test_several_processes_are_refused(monkeypatch):
    engine = lockstep.engines.current_engine()
    layout = session_of(lockstep.place(chain(), {"dense_1": 1})).layout
    monkeypatch.setattr(process_group, "several", lambda: True)
    said = r"several processes are running.\nStart one process"
    with pytest.raises(UnsupportedBackend, match=said):
        attach(engine, chain(), layout)
