"""What is compared before the first step in micro-batches on JAX, and what needs its proof only."""

import dataclasses

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.engines.jax.parts import call_in_parts
from lockstep.engines.jax.parts import micro_batches as in_parts
from lockstep.engines.jax.rowtrace.row_labels import Place
from tests.conformance.common import assert_same, weights
from tests.conformance.test_micro_batches import (
    Own,
    chain,
    convolutional,
    data,
    fit,
    recurrent,
    refusal,
    transformer,
    words,
)


def compared(monkeypatch, *, always=False):
    """Return the list that gets an entry for each comparison of first rows."""
    plain, trace, found = in_parts.compare_first_rows, call_in_parts.trace_rows, []

    def compare(*args):
        found.append(args)
        return plain(*args)

    def on_trust(*args):
        return dataclasses.replace(trace(*args), trusted=(Place("", "call", ""),))

    monkeypatch.setattr(in_parts, "compare_first_rows", compare)
    if always:
        monkeypatch.setattr(call_in_parts, "trace_rows", on_trust)
    return found


def test_what_is_proved_is_not_compared_too(monkeypatch):
    found = compared(monkeypatch)
    made = lockstep.distribute(chain(layers.Dropout(0.2)), 1, micro_batch_size=3)
    fit(made)
    assert not found


@jax.custom_vjp
def scaled_by(x, scale):
    return x * 1.0


scaled_by.defvjp(
    lambda x, scale: (scaled_by(x, scale), scale),
    lambda scale, change: (change * scale, ops.zeros_like(scale)),
)


def test_a_gradient_that_is_taken_on_trust_is_compared():
    """Its forward pass does not use the mean over rows, and its backward pass does."""
    scaled = Own(lambda self, x: scaled_by(x, 9 * ops.exp(ops.mean(x, axis=0))), name="scaled")
    assert refusal(chain(scaled)).startswith(
        "'sequential' gives different gradients if the first rows run in two parts"
    )


def test_the_parts_are_the_program_that_was_proved():
    """A layer that does something else if it is traced again for the rows of a part."""

    def odd():
        traces = {8: 1}

        def call(layer, x):
            if x.shape[0] != 8:
                traces[x.shape[0]] = traces.get(x.shape[0], 0) + 1
            return x * traces[x.shape[0]]

        return Own(call)

    one, made = chain(odd()), lockstep.distribute(chain(odd()), 1, micro_batch_size=3)
    for each in (one, made):
        each.train_on_batch(*data(8))
    assert_same(weights(made), weights(one), atol=1e-6)


SAMPLE = {
    "token head": lambda: words(12),
    "transformer": transformer,
    "lstm": recurrent,
    "cnn": convolutional,
    "norms": lambda: chain(layers.GroupNormalization(2), layers.UnitNormalization()),
    "noise": lambda: chain(layers.GaussianNoise(0.2), layers.Dropout(0.3)),
    "spectral": lambda: chain(layers.SpectralNormalization(layers.Dense(6))),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SAMPLE)
def test_a_comparison_finds_nothing_in_what_is_proved(name, monkeypatch):
    """Values and gradients of a sample that is compared whatever the proof says."""
    found = compared(monkeypatch, always=True)
    keras.utils.set_random_seed(5)
    made = SAMPLE[name]()
    made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    lockstep.distribute(made, 1, micro_batch_size=3)
    rng = np.random.default_rng(5)
    shape = made.input_shape[1:]
    whole = "int" in str(made.inputs[0].dtype)
    x = rng.integers(1, 50, (8, *shape)) if whole else rng.normal(size=(8, *shape))
    made.train_on_batch(x, rng.integers(0, 2, (8, *made.output_shape[1:-1])))
    assert found
