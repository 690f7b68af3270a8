"""The smallest script: one model, one line of lockstep, one plain Keras file.

LOCKSTEP_REHEARSE=4 KERAS_BACKEND=jax python examples/minimal.py
lockstep verify examples/minimal.py:build --devices 4 --rehearse
"""

import argparse

import keras
import numpy as np
from keras import layers

import lockstep


def build():
    """Return a compiled model and its data, as `lockstep verify` and `lockstep bench` need them."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(128, activation="gelu"),
            layers.Dropout(0.2),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    x = np.random.default_rng(0).normal(size=(1003, 64)).astype("float32")
    return model, (x, x[:, :10].argmax(axis=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--file", default="minimal.keras")
    options = parser.parse_args()

    model, (x, y) = build()
    lockstep.distribute(model)  # all devices
    model.fit(x, y, batch_size=100, epochs=options.epochs)  # 100 rows over all devices
    model.save(options.file)  # a plain file: loads on one device, without lockstep

    from check_file import check_file

    check_file(options.file, model, x[:8])
