"""A stateful LSTM: long sequences in windows, with the state carried from one to the next.

Row i of every batch goes on where row i of the batch before ended. That a sequence fed
in windows is the sequence fed whole is checked at the end, against the same weights in
a network without state.
"""

import argparse
import sys

import keras
import numpy as np
from check_file import check_file
from keras import layers

import lockstep

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--devices", type=int, default=4)
parser.add_argument("--sequences", type=int, default=64, help="rows of every batch")
parser.add_argument("--windows", type=int, default=50, help="windows in a sequence")
parser.add_argument("--window", type=int, default=20, help="steps in a window")
parser.add_argument("--units", type=int, default=64)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--file", default="stateful.keras")
options = parser.parse_args()

SEQUENCES, WINDOW, STEPS = options.sequences, options.window, options.windows * options.window


def network(batch_shape, stateful):
    return keras.Sequential(
        [
            keras.Input(batch_shape=batch_shape),
            layers.LSTM(options.units, return_sequences=True, stateful=stateful),
            layers.Dense(1),
        ]
    )


def in_windows(sequences):
    """The rows of all first windows, then those of all second windows, and so on."""
    windows = sequences.reshape(SEQUENCES, options.windows, WINDOW, 1)
    return windows.swapaxes(0, 1).reshape(-1, WINDOW, 1)


def whole(windows):
    """What `in_windows` cut, put together again."""
    windows = windows.reshape(options.windows, SEQUENCES, WINDOW, 1)
    return windows.swapaxes(0, 1).reshape(SEQUENCES, STEPS, 1)


class StartOver(keras.callbacks.Callback):
    """Every epoch and every evaluation begins at the beginning of the sequences."""

    def _reset(self, *_, **__):
        for layer in self.model.layers:
            if getattr(layer, "stateful", False):
                layer.reset_states()

    on_epoch_begin = on_test_begin = on_predict_begin = _reset


keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.choice([-1.0, 1.0], (SEQUENCES, STEPS, 1)).astype("float32")
y = np.tanh(np.cumsum(x, axis=1) / 10).astype("float32")  # far more than one window back

model = lockstep.distribute(network((SEQUENCES, WINDOW, 1), stateful=True), options.devices)
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
model.fit(
    in_windows(x),
    in_windows(y),
    batch_size=SEQUENCES,
    epochs=options.epochs,
    shuffle=False,
    callbacks=[StartOver()],
)

model.save(options.file)

pieces = model.predict(in_windows(x), batch_size=SEQUENCES, verbose=0, callbacks=[StartOver()])
twin = network((SEQUENCES, STEPS, 1), stateful=False)
twin.set_weights(model.get_weights())
difference = np.max(np.abs(whole(pieces) - twin.predict(x, batch_size=SEQUENCES, verbose=0)))
print(f"in windows and whole: largest difference {difference:.1e}")
if not difference <= 1e-5:
    sys.exit("The state was not carried from window to window.")

for layer in model.layers:
    if getattr(layer, "stateful", False):
        layer.reset_states()
check_file(options.file, model, x[:, :WINDOW])
