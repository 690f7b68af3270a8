"""An error of a worker, at any message of the protocol, is an error of the call in the caller."""

import os

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.engines.torch.ranks import pool
from tests.agreement import assert_equal, both, values
from tests.tiers import every

QUIET = {"verbose": 0, "shuffle": False, "batch_size": 5}

pytestmark = pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")

FAULTY = """\
import json, os, sys
options = json.loads(sys.argv[1])
sys.path[:] = options.pop("path")
from lockstep.engines.torch.ranks import worker
message, rank = {fault!r}
plain = worker._Worker.follow

def faulty(self, sent):
    name, content = sent
    if message in (name, *content[1:2]) and self._group.rank == rank:
        raise KeyError("planted")
    plain(self, sent)

worker._Worker.follow = faulty
worker.main(**options)
"""


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def plain():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def own():
    model = OwnStep([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def proven():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), Doubles(), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


class Doubles(layers.Layer):
    def call(self, x):
        return x * 2.0


class Accumulates(keras.Sequential):
    """Keeps its gradients from step to step."""

    def train_step(self, data):
        x, y = data
        loss = self.compute_loss(x, y, self(x, training=True))
        loss.backward()
        return {"loss": loss}


def accumulating():
    model = Accumulates([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


MESSAGES = {
    "model": plain,
    "take_plan": proven,
    "take_values": plain,
    "differing": plain,
    "settings": plain,
    "exchanges": plain,
    "take_gradients": accumulating,
    "seeds": own,
    "step": plain,
    "whole_step": own,
}


def run(model):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(10, 4)), rng.normal(size=(10, 2))
    for _ in range(2):
        model.fit(x, y, **QUIET)
        for variable in model.trainable_variables:  # what a callback of the user's may do
            if variable.value.grad is not None:
                variable.value.grad *= 0.5


@pytest.mark.thorough
@pytest.mark.parametrize(
    "devices",
    [["cpu:0", "cpu:1"], pytest.param(["cpu:0", "cpu:1", "cpu:3"], marks=pytest.mark.whole)],
)
@pytest.mark.parametrize("message", every(4, MESSAGES))
def test_an_error_at_a_message_comes_home_and_the_next_call_works(message, devices, monkeypatch):
    one, many = both(MESSAGES[message], devices)
    fault = message, len(devices) - 1
    monkeypatch.setattr(pool, "_pools", {})  # no warm pool of a model of another test
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_START", FAULTY.format(fault=fault))
        with pytest.raises(KeyError, match="planted") as caught:
            run(many)
    assert f"replica {len(devices) - 1}" in caught.value.__notes__[0]
    del caught
    lockstep.release(many)
    many.set_weights(one.get_weights())
    for variable in many.trainable_variables:
        variable.value.grad = None
    lockstep.distribute(many, devices)
    run(one)
    run(many)
    assert_equal(values(one)[: len(one.weights)], values(many)[: len(one.weights)])
    lockstep.release(many)


class Own(Exception):
    """An error of the user's own."""


class RaisesOwn(layers.Layer):
    """Raises in the process of a worker."""

    def __init__(self, error):
        super().__init__()
        self.home = os.getpid()
        self.error = error

    def call(self, x):
        if os.getpid() != self.home:
            raise self.error("in a worker")
        return x * 1.0


def local_error():
    class Local(Own):
        pass

    return Local


@pytest.mark.thorough
@pytest.mark.parametrize("error", [Own, local_error()])
def test_an_error_of_the_users_own_class_leaves_the_class_alone(error):
    def build():
        return keras.Sequential([keras.Input((4,)), layers.Dense(3), RaisesOwn(error)])

    _, many = both(build)
    before = dict(vars(error))
    with pytest.raises(Own, match="in a worker"):
        many.predict(np.ones((6, 4)), verbose=0)
    assert dict(vars(error)) == before
    lockstep.release(many)
