"""Stateful RNNs carry their state from batch to batch, on one device too."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.errors import UnsplitBatchWarning
from tests.agreement import assert_equal, both, values
from tests.tiers import rest

ROWS, STEPS, PIECES = 5, 3, 4

pytestmark = pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")

# Keras 3.15.1 on PyTorch raises in the fit of a stateful LSTM or GRU with its fast path. The other
# path is the truth.
RNNS = {
    "LSTM": lambda stock: layers.LSTM(
        4, return_sequences=True, stateful=True, use_cudnn=not stock and "auto"
    ),
    "GRU": lambda stock: layers.GRU(
        4, return_sequences=True, stateful=True, use_cudnn=not stock and "auto"
    ),
    "both ways": lambda stock: layers.Bidirectional(
        layers.LSTM(4, return_sequences=True, stateful=True, use_cudnn=not stock and "auto")
    ),
    "stacked cells": lambda stock: layers.RNN(
        [layers.LSTMCell(3), layers.GRUCell(4)], return_sequences=True, stateful=True
    ),
}


def made(name, *, stock, rows=ROWS):
    inputs = keras.Input(batch_shape=(rows, STEPS, 2))
    model = keras.Model(inputs, layers.Dense(2)(RNNS[name](stock)(inputs)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def pieces():
    rng = np.random.default_rng(0)
    return rng.normal(size=(2, ROWS * PIECES, STEPS, 2))


def states(model):
    rnn = model.layers[-2]
    both_ways = [rnn.forward_layer, rnn.backward_layer] if hasattr(rnn, "forward_layer") else [rnn]
    every = [state for each in both_ways for state in keras.tree.flatten(each.states)]
    return [ops.convert_to_numpy(state) for state in every]


SAMPLE = [("LSTM", 3), ("LSTM", 1), ("GRU", 1), ("stacked cells", 3)]
REST = rest(("GRU", 3), ("both ways", 3), ("both ways", 1), ("stacked cells", 1))


@pytest.mark.parametrize(("name", "devices"), [*SAMPLE, *REST])
def test_the_state_goes_from_row_to_row(name, devices):
    ways = iter((True, False))
    alone, mine = both(lambda: made(name, stock=next(ways)), devices)
    x, y = pieces()
    options = {"batch_size": ROWS, "verbose": 0}
    for model in (mine, alone):
        model.fit(x, y, shuffle=False, epochs=2, **options)
    assert_equal(values(mine), values(alone))
    assert max(np.abs(state).max() for state in states(alone)) > 0.01
    assert_equal(states(mine), states(alone))
    assert_equal(mine.predict(x, **options), alone.predict(x, **options))
    lockstep.release(mine)  # in the middle of the sequences
    assert_equal(mine.evaluate(x, y, **options), alone.evaluate(x, y, **options))


def test_every_process_runs_its_rows_of_the_state():
    """There is no warning of a layer that runs whole; one process has no row."""
    ways = iter((True, False))
    alone, mine = both(lambda: made("LSTM", stock=next(ways), rows=3), 4)
    x, y = (each[:12] for each in pieces())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsplitBatchWarning)
        for model in (alone, mine):
            model.fit(x, y, batch_size=3, shuffle=False, verbose=0)
    assert_equal(states(mine), states(alone))
    assert_equal(values(mine), values(alone))


def test_a_sequence_in_pieces_equals_the_whole_one():
    """The definition of a stateful RNN; no stock Keras is needed for it."""
    x, _ = pieces()
    long = np.concatenate(np.split(x, PIECES), axis=1)
    keras.utils.set_random_seed(2)
    mine = lockstep.distribute(made("LSTM", stock=False), 3)
    plain = keras.Sequential([keras.Input((None, 2)), layers.LSTM(4, return_sequences=True)])
    plain.add(layers.Dense(2))
    plain.set_weights(mine.get_weights())
    outputs = np.split(mine.predict(x, batch_size=ROWS, verbose=0), PIECES)
    assert_equal(np.concatenate(outputs, axis=1), plain.predict(long, verbose=0))


@pytest.mark.thorough
def test_another_number_of_rows_is_refused():
    mine = lockstep.distribute(made("LSTM", stock=False), 3)
    x, y = pieces()
    with pytest.raises(ValueError, match="the batch size of the input sequences must be the same"):
        mine.fit(x[:9], y[:9], batch_size=ROWS, verbose=0)
