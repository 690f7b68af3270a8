"""A run that may be killed at any moment: start the same command again, and it goes on.

    LOCKSTEP_REHEARSE=4 KERAS_BACKEND=jax python examples/checkpoint.py

Press Ctrl-C, or kill -9 the process, and start it again, also with another number of devices.
"""

import argparse

import keras
import numpy as np
from check_file import check_file
from keras import layers

import lockstep

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--devices", type=int, default=None, help="all devices if left out")
parser.add_argument("--samples", type=int, default=20011)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch", type=int, default=100, help="rows over all devices together")
parser.add_argument("--steps", type=int, default=50, help="steps between two checkpoints")
parser.add_argument("--folder", default="runs/checkpoint")
options = parser.parse_args()

keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(options.samples, 32)).astype("float32")
y = x[:, :8].argmax(axis=1)

model = keras.Sequential(
    [
        keras.Input((32,)),
        layers.Dense(64, activation="gelu"),
        layers.Dropout(0.1),
        layers.Dense(8, activation="softmax"),
    ]
)
lockstep.distribute(model, options.devices)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    x,
    y,
    batch_size=options.batch,
    epochs=options.epochs,
    callbacks=[lockstep.Checkpoint(options.folder, steps=options.steps)],
)
model.save(f"{options.folder}/model.keras")

check_file(f"{options.folder}/model.keras", model, x[:8])
