"""Stateful RNNs are split: each replica runs its rows of the state, and the state stays whole."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel
from tests.conformance.common import assert_same

ROWS, STEPS, PIECES = 5, 3, 4


def _both_ways(**kwargs):
    inner = layers.LSTM(4, return_sequences=True, **kwargs)
    return layers.Bidirectional(inner, name="rnn")


RNNS = {
    "LSTM": lambda **kw: layers.LSTM(4, return_sequences=True, **kw),
    "GRU, backwards": lambda **kw: layers.GRU(
        4, return_sequences=True, reset_after=False, go_backwards=True, **kw
    ),
    "SimpleRNN, unrolled": lambda **kw: layers.SimpleRNN(
        4, return_sequences=True, unroll=True, **kw
    ),
    "stacked cells": lambda **kw: layers.RNN(
        [layers.LSTMCell(3), layers.GRUCell(4)], return_sequences=True, **kw
    ),
    "both ways": _both_ways,
    "ConvLSTM1D": lambda **kw: layers.ConvLSTM1D(2, 2, padding="same", return_sequences=True, **kw),
}


def _made(name, *, masked=False):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(2)
    shape = (STEPS, 6, 2) if name.startswith("Conv") else (STEPS, 2)
    inputs = keras.Input(batch_shape=(ROWS, *shape))
    hidden = layers.Masking()(inputs) if masked else inputs
    hidden = RNNS[name](stateful=True)(hidden)
    made = keras.Model(inputs, layers.Dense(2)(hidden))
    made.compile(keras.optimizers.SGD(0.1), "mse")
    return made


def _pieces(made, *, masked=False):
    rng = np.random.default_rng(0)
    rows = ROWS * PIECES
    x = rng.normal(size=(rows, *made.input_shape[1:])).astype("float32")
    if masked:
        x *= (np.arange(STEPS) < rng.integers(1, STEPS + 1, (rows, 1)))[..., None]
    return x, rng.normal(size=(rows, *made.output_shape[1:])).astype("float32")


def _states(made):
    rnn = made.layers[-2]
    both = [rnn.forward_layer, rnn.backward_layer] if hasattr(rnn, "forward_layer") else [rnn]
    return [ops.convert_to_numpy(s) for each in both for s in keras.tree.flatten(each.states)]


class _ResetsAfterTwo(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            for layer in self.model.layers:
                if hasattr(layer, "reset_state"):
                    layer.reset_state()
                elif hasattr(layer, "reset_states"):
                    layer.reset_states()


SAMPLE = [("LSTM", True), ("stacked cells", False)]
REST = [
    ("LSTM", False),
    ("both ways", True),
    ("both ways", False),
    *((name, False) for name in list(RNNS)[1:3]),
]
REST += [("ConvLSTM1D", False)]


@pytest.mark.parametrize(
    ("name", "masked"),
    [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.whole) for case in REST)],
)
def test_the_state_goes_from_row_to_row(name, masked):
    """No warning: the layer is split. The truth is Keras on one device."""
    alone, made = _made(name, masked=masked), lockstep.distribute(_made(name, masked=masked), 3)
    x, y = _pieces(alone, masked=masked)
    options = {"batch_size": ROWS, "verbose": 0}
    # Keras 3.15.1 cannot reset the states of stacked cells.
    resets = [] if name == "stacked cells" else [_ResetsAfterTwo()]
    for each in (made, alone):
        each.fit(x, y, shuffle=False, epochs=2, callbacks=resets, **options)
    assert_same(made.get_weights(), alone.get_weights())
    assert max(np.abs(state).max() for state in _states(alone)) > 0.01
    assert_same(_states(made), _states(alone))
    assert_same(made.predict(x, **options), alone.predict(x, **options))
    lockstep.distribute(made, 2)  # in the middle of the sequences
    assert_same(made.evaluate(x, y, **options), alone.evaluate(x, y, **options))
    lockstep.release(made)
    assert_same(_states(made), _states(alone))
    assert_same(made.predict(x, **options), alone.predict(x, **options))


def test_another_number_of_rows_is_refused():
    made = lockstep.distribute(_made("LSTM"), 3)
    x, y = _pieces(made)
    said = r"^The state of '\w+' has 5 rows, but the batch has a different number"
    with pytest.raises(UnsupportedModel, match=said):
        made.fit(x[:9], y[:9], batch_size=ROWS, verbose=0)


@pytest.mark.whole
def test_a_state_that_is_no_matter_of_rows_is_not_split():
    """A layer of one's own around it is not proven, and runs whole."""

    @keras.saving.register_keras_serializable("lockstep_tests")
    class Around(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.rnn = layers.LSTM(4, return_sequences=True, stateful=True)

        def build(self, shape):
            self.rnn.build(shape)

        def call(self, x):
            return self.rnn(x)

    def make():
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(2)
        inputs = keras.Input(batch_shape=(ROWS, STEPS, 2))
        made = keras.Model(inputs, layers.Dense(2)(Around(name="around")(inputs)))
        made.compile(keras.optimizers.SGD(0.1), "mse")
        return made

    alone, made = make(), lockstep.distribute(make(), 3)
    x, y = _pieces(alone)
    with pytest.warns(UnsplitBatchWarning, match="'around'"):
        mine = made.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0).history
    assert_same(mine, alone.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0).history)
    assert_same(made.get_weights(), alone.get_weights())
