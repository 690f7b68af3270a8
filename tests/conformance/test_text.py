"""Real text: a character model with a state, on Python's own source."""

import inspect
import statistics

import keras
import numpy as np
import pytest
from keras import layers

import lockstep

ROWS, WINDOW, WINDOWS, UNITS = 16, 8, 40, 24


def text():
    """Characters of a standard module as numbers, in `ROWS` long parallel parts."""
    source = inspect.getsource(statistics).encode("ascii", "replace")
    codes = np.frombuffer(source, "uint8")
    _, codes = np.unique(codes, return_inverse=True)
    long = codes[: ROWS * (WINDOW * WINDOWS + 1)].reshape(ROWS, -1)
    x, y = long[:, :-1], long[:, 1:]
    cut = [np.s_[:, start : start + WINDOW] for start in range(0, WINDOW * WINDOWS, WINDOW)]
    return (
        np.concatenate([x[piece] for piece in cut]),
        np.concatenate([y[piece] for piece in cut]),
        int(codes.max()) + 1,
    )


def train(devices, stateful=True):
    """The losses of the epochs, and of two evaluations: with the state, and without."""
    x, y, kinds = text()
    keras.utils.set_random_seed(1)
    made = keras.Sequential(
        [
            keras.Input(batch_shape=(ROWS, WINDOW), dtype="int32"),
            layers.Embedding(kinds, 12),
            layers.LSTM(UNITS, return_sequences=True, stateful=stateful),
            layers.Dense(kinds, activation="softmax"),
        ]
    )
    made.compile(keras.optimizers.SGD(1.5, clipnorm=1.0), "sparse_categorical_crossentropy")
    lockstep.distribute(made, devices)
    reset = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: made.reset_states())
    losses = made.fit(
        x, y, batch_size=ROWS, shuffle=False, epochs=12, verbose=0, callbacks=[reset]
    ).history["loss"]
    made.reset_states()
    carried = made.evaluate(x, y, batch_size=ROWS, verbose=0)
    forget = keras.callbacks.LambdaCallback(
        on_test_batch_begin=lambda batch, logs: made.reset_states()
    )
    forgotten = made.evaluate(x, y, batch_size=ROWS, verbose=0, callbacks=[forget])
    return [*losses, carried, forgotten]


@pytest.mark.whole
def test_four_devices_equal_one_and_the_state_helps():
    one, four, without = train(1), train(4), train(1, stateful=False)
    np.testing.assert_allclose(four, one, rtol=0, atol=1e-5)
    *losses, carried, forgotten = one
    assert losses[-1] < losses[0]
    assert losses[-1] < without[len(losses) - 1]
    assert carried < forgotten
