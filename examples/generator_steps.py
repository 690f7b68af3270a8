"""A generator without end, `steps_per_epoch` and `validation_steps`, and three callbacks.

The generator gives global batches, as for one device; each is split over the devices.
TensorBoard's files need the packages tensorflow and tensorboard.
"""

import argparse

import keras
import numpy as np
from check_file import check_file
from keras import layers

import lockstep

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--devices", type=int, default=4)
parser.add_argument("--steps", type=int, default=100, help="batches in an epoch")
parser.add_argument("--validation-steps", type=int, default=20)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch", type=int, default=100, help="rows over all devices together")
parser.add_argument("--logs", default="logs")
parser.add_argument("--file", default="spirals.keras")
options = parser.parse_args()


def spirals(batch, seed):
    """Points on two noisy spirals, and on which of them they are; for ever."""
    rng = np.random.default_rng(seed)
    while True:
        labels = rng.integers(2, size=batch, dtype="int32")
        turns = rng.uniform(0.2, 1.5, batch)
        angles = 2 * np.pi * turns + np.pi * labels
        points = turns[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        yield (points + rng.normal(0, 0.03, points.shape)).astype("float32"), labels


keras.utils.set_random_seed(1)
model = keras.Sequential(
    [
        keras.Input((2,)),
        layers.Dense(64, activation="swish"),
        layers.Dense(64, activation="swish"),
        layers.Dense(2, activation="softmax"),
    ]
)
lockstep.distribute(model, options.devices)
model.compile(
    optimizer=keras.optimizers.Adam(0.01),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(
    spirals(options.batch, seed=0),
    steps_per_epoch=options.steps,
    epochs=options.epochs,
    shuffle=False,  # a generator has its own order
    validation_data=spirals(options.batch, seed=1),
    validation_steps=options.validation_steps,
    callbacks=[
        keras.callbacks.EarlyStopping(patience=5, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(factor=0.3, patience=2),
        keras.callbacks.TensorBoard(options.logs),
    ],
)

model.save(options.file)

points, _ = next(spirals(options.batch, seed=2))
check_file(options.file, model, points)
