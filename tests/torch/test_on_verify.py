"""`verify` on PyTorch passes what is right, and names what is wrong."""

import os

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import lockstep
from lockstep.engines import current_engine
from tests.precision import floats
from tests.sampling import rest
from tests.torch.agreement import values


def data(rows=40):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 1)).astype(
        "float32"
    )


def with_layer(*between, optimizer="sgd"):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="gelu", name="first")])
    for layer in between:
        made.add(layer)
    made.add(layers.Dense(1, name="last"))
    made.compile(optimizer, "mse", metrics=["mae"])
    return made


@pytest.mark.parametrize("seed", [3, *rest(None)])
def test_a_right_model_is_equal_in_everything(seed):
    """With dropout: for the comparison every device draws the numbers of the whole batch."""
    made = with_layer(
        layers.BatchNormalization(),
        layers.Dropout(0.2, seed=seed),
        layers.GaussianNoise(0.1, seed=seed),
        optimizer="adam",
    )
    found = lockstep.verify(made, data(), devices=3, steps=5, batch_size=10)
    assert found.equal, found.cause
    assert max(difference.largest for difference in found.differences) <= 1e-10
    assert found.notes == ()


@pytest.mark.parametrize("devices", [3, *rest(None)])
def test_the_model_is_untouched(devices):
    made = with_layer(layers.BatchNormalization(), layers.Dropout(0.2), optimizer="adam")
    if devices:
        lockstep.distribute(made, devices)
    made.fit(*data(), verbose=0)
    before, random = values(made), torch.get_rng_state()
    before = [value.copy() for value in before]
    lockstep.verify(made, data(), devices=3, steps=2)
    for mine, theirs in zip(values(made), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert torch.equal(torch.get_rng_state(), random)
    assert ("fit" in vars(made)) == bool(devices)


class ProcessReader(layers.Layer):
    """Multiplies with a number that depends on the process."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.home = os.getpid()

    def call(self, x):
        return x * (1.0 if os.getpid() == self.home else 1.5)


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
def test_a_layer_that_reads_the_devices_is_named(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")  # the check of the first step finds it too
    made = with_layer(ProcessReader(name="culprit"))
    found = lockstep.verify(made, data(), devices=3, steps=3)
    assert not found.equal
    assert found.first_step == 1
    assert found.first_layer.endswith("culprit")
    assert "something else on several devices" in found.cause


class PythonCounter(layers.Layer):
    """Counts its calls in Python."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.count = 0

    def call(self, x):
        self.count += 1
        return x * (1 + 0.1 * self.count)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
def test_a_layer_with_state_in_python_is_named():
    found = lockstep.verify(with_layer(PythonCounter(name="culprit")), data(), devices=3, steps=3)
    assert not found.equal
    assert found.first_layer.endswith("culprit")
    assert "not deterministic" in found.cause


def test_a_layer_that_is_not_split_is_a_note():
    made = with_layer(layers.Lambda(lambda t: t - ops.mean(t, axis=0), name="across"))
    found = lockstep.verify(made, data(), devices=3, steps=2)
    assert found.equal, found.cause
    assert any("every device runs 'across' (Mean)" in note for note in found.notes)


class CustomStep(keras.Model):
    """A model that is not built, with a step that takes the batches of `fit` alone."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6)

    def call(self, x):
        return self.dense(x)

    def train_step(self, x):
        assert isinstance(x, torch.Tensor), type(x)
        self.zero_grad()
        loss = ops.mean((self(x) - x) ** 2)
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": loss}


@pytest.mark.whole
def test_batches_reach_a_training_step_as_fit_hands_them_over():
    keras.utils.set_random_seed(3)
    made = CustomStep()
    made.compile("sgd")
    found = lockstep.verify(made, data()[0], devices=3, steps=3, batch_size=7)
    assert found.equal, found.cause
    assert not found.notes  # all devices share it


class TwoOptimizers(keras.Model):
    """Two optimizers that `compile` is not given, and that build themselves at their first step."""

    def __init__(self):
        super().__init__()
        self.parts = [layers.Dense(4), layers.Dense(4)]
        for part in self.parts:
            part.build((None, 6))
        self.built = True
        self.first = keras.optimizers.Adam(0.01)
        self.second = keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.5)

    def train_step(self, x):
        self.zero_grad()
        loss = sum(ops.mean((part(x) - 1.0) ** 2) for part in self.parts)
        loss.backward()
        with torch.no_grad():
            for part, optimizer in zip(self.parts, (self.first, self.second), strict=True):
                weights = part.trainable_weights
                optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": loss}


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
def test_optimizers_that_build_themselves_in_the_first_step():
    """Their slots were no variables at the start, and could not be put back: a KeyError."""
    keras.utils.set_random_seed(3)
    made = TwoOptimizers()
    made.compile()
    found = lockstep.verify(made, data()[0], devices=3, steps=3, batch_size=7)
    assert found.equal, found.cause
    assert {"first", "second"} <= {d.name.split("/")[0] for d in found.differences}
    fresh = keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.5)
    fresh.build(made.parts[1].trainable_variables)
    for mine, theirs in zip(made.second.variables, fresh.variables, strict=True):
        np.testing.assert_array_equal(*map(ops.convert_to_numpy, (mine, theirs)))


@pytest.mark.whole
def test_a_loss_that_is_not_finite_is_not_called_equal():
    x, y = data(70)
    x[33] = np.nan
    found = lockstep.verify(with_layer(), (x, y), devices=3, steps=3)
    assert (found.verdict, found.not_finite_from, found.steps) == ("cannot tell", 2, 1)


@pytest.mark.parametrize("casts", [False, *rest(True)])
def test_casts_to_a_shorter_float_are_found(casts):
    """They bound what a comparison in float64 can say."""
    with floats("float64"):
        cast = layers.Lambda(lambda x: x.float().to(x.dtype))
        made = with_layer(layers.BatchNormalization(), *[cast] * casts, optimizer="adam")
        x, y = data(10)
        batch = (x.astype("float64"), y.astype("float64"))
        made.fit(*batch, verbose=0)
        assert current_engine().probe(made).build(batch) == ("float32" if casts else None)
