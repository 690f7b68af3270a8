"""The reader's own script, as pages name it: `train.py:build` returns a model and its data."""

import keras
import numpy as np


def build():
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(10, activation="softmax")], name="digits"
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    x = np.random.default_rng(0).normal(size=(203, 64)).astype("float32")
    return model, (x, x[:, :10].argmax(axis=1))


if __name__ == "__main__":
    import lockstep

    model, (x, y) = build()
    lockstep.distribute(model)
    model.fit(x, y, batch_size=100, verbose=0)
