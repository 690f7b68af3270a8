"""Two inputs from `tf.data`, a validation set and `EarlyStopping`. Needs tensorflow for the data.

LOCKSTEP_REHEARSE=4 KERAS_BACKEND=jax python examples/tf_data.py
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from check_file import check_file
from keras import layers

import lockstep

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--devices", type=int, default=4)
parser.add_argument("--samples", type=int, default=5003)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch", type=int, default=100, help="rows over all devices together")
parser.add_argument("--file", default="two_inputs.keras")
options = parser.parse_args()

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
sensors = rng.normal(size=(options.samples, 16)).astype("float32")
words = rng.integers(1, 100, size=(options.samples, 12), dtype="int32")
words[:, 8:] *= rng.integers(2, size=(options.samples, 1), dtype="int32")  # 0 is padding
labels = (sensors[:, 0] + (words < 50).mean(axis=1) > 0.5).astype("float32")

x = {"sensors": sensors, "words": words}
dataset = tf.data.Dataset.from_tensor_slices((x, labels))
held_out = options.samples // 5
validation = dataset.take(held_out).batch(options.batch)
training = dataset.skip(held_out).shuffle(1000, seed=0).batch(options.batch).prefetch(2)

sensor_input = keras.Input((16,), name="sensors")
word_input = keras.Input((12,), name="words", dtype="int32")
read = layers.GRU(16)(layers.Embedding(100, 16, mask_zero=True)(word_input))
joined = layers.Concatenate()([layers.Dense(16, activation="gelu")(sensor_input), read])
model = keras.Model(
    {"sensors": sensor_input, "words": word_input}, layers.Dense(1, activation="sigmoid")(joined)
)
lockstep.distribute(model, options.devices)
model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
model.fit(
    training,  # batches of the global size; the last one is smaller
    shuffle=False,  # the data set has its own order
    validation_data=validation,
    epochs=options.epochs,
    callbacks=[keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)],
)
model.save(options.file)

check_file(options.file, model, {name: rows[:8] for name, rows in x.items()})
