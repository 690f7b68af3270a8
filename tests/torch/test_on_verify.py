"""`verify` on PyTorch, beyond what each backend has: optimizers of a step, and casts."""

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import lockstep
from lockstep.engines.torch.ranks import traced_steps
from lockstep.engines.torch.traced.trace import TracedStep
from tests.every_backend.test_verify import data
from tests.torch.test_on_traced_steps import X, Y, network


@pytest.fixture(autouse=True)
def _same_names():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


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
    torch.set_float32_matmul_precision("high")
    try:
        found = lockstep.verify(made, data()[0], devices=3, steps=3, batch_size=7)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert found.equal, found.cause
    assert {"first", "second"} <= {d.name.split("/")[0] for d in found.differences}
    fresh = keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.5)
    fresh.build(made.parts[1].trainable_variables)
    for mine, theirs in zip(made.second.variables, fresh.variables, strict=True):
        np.testing.assert_array_equal(*map(ops.convert_to_numpy, (mine, theirs)))


def test_a_model_with_jit_compile_is_verified_as_graphs():
    made = network(layers.Dropout(0.3))
    made.compile("adam", "mse", jit_compile=True)
    found = lockstep.verify(made, (X, Y), devices=3, steps=3, batch_size=7)
    assert found.equal, found.cause
    assert found.notes == (
        "With jit_compile=True, 2 of 3 steps on 3 devices ran as graphs, and the rest by Keras's "
        "code.",
    )
    assert made.jit_compile
    assert "no step on 3 devices ran" in lockstep.verify(made, (X, Y), 3, steps=1).notes[0]


def test_a_wrong_graph_is_found(monkeypatch):
    """Its own comparison with one device is left out here."""

    def run(self, batch):
        found = plain(self, batch)
        return found._replace(values=[each * 1.001 for each in found.values])

    plain = TracedStep.run
    monkeypatch.setattr(TracedStep, "run", run)
    monkeypatch.setattr(traced_steps, "is_checked", lambda: False)
    made = network(optimizer="sgd")
    made.jit_compile = True
    found = lockstep.verify(made, (X, Y), devices=2, steps=3, batch_size=8)
    assert found.verdict == "different"
    assert found.first_step == 2
    assert "verify the model without jit_compile=True" in found.cause
    made.jit_compile = False
    assert lockstep.verify(made, (X, Y), devices=2, steps=3, batch_size=8).equal
