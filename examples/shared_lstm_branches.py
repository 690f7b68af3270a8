"""Two branches on two devices, and the rest on a third: the old recipe of a shared LSTM.

LOCKSTEP_REHEARSE=3 KERAS_BACKEND=jax python examples/shared_lstm_branches.py
"""

import argparse

import keras
import numpy as np

import lockstep

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--samples", type=int, default=2000)
parser.add_argument("--length", type=int, default=140)
parser.add_argument("--units", type=int, default=64)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--file", default="branches.keras")
options = parser.parse_args()

keras.utils.set_random_seed(0)
first, second, third = lockstep.devices()[:3]

input_a = keras.Input((options.length, 16))
input_b = keras.Input((options.length, 16))
shared_lstm = keras.layers.LSTM(options.units)

with lockstep.on(first):  # the weights are here
    encoded_a = shared_lstm(input_a)
with lockstep.on(second):  # and in each step a copy of them here
    encoded_b = shared_lstm(input_b)
with lockstep.on(third):
    merged = keras.layers.concatenate([encoded_a, encoded_b])
    outputs = keras.layers.Dense(1, activation="sigmoid")(merged)

model = keras.Model([input_a, input_b], outputs)
model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
print(lockstep.placement(model))

# Do two sequences end with the same sign?
rng = np.random.default_rng(0)
a, b = (rng.normal(size=(options.samples, options.length, 16)).astype("float32") for _ in "ab")
same = np.sign(a[:, -1, 0]) == np.sign(b[:, -1, 0])

model.fit([a, b], same, batch_size=options.batch, epochs=options.epochs)
model.save(options.file)  # a plain file: no device is in it

# Plain Keras loads the file, and predicts the same on one device.
reloaded = keras.models.load_model(options.file)
difference = np.max(np.abs(reloaded.predict([a, b], verbose=0) - model.predict([a, b], verbose=0)))
name = options.file.rsplit("/", 1)[-1]
print(f"{name} by plain Keras on one device: largest difference {difference:.1e}")
