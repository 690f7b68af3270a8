"""A model of 300 variables that leaves 1e-5 in float32; as a script, it is verified too."""

import keras
import numpy as np
from keras import layers


def build():
    """Return the model, and data. Batch norm removes each bias, and Adam moves it by rounding."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,))])
    for _ in range(22):
        model.add(layers.Dense(4))
        model.add(layers.BatchNormalization())
    model.add(layers.Dense(1))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    rng = np.random.default_rng(0)
    return model, (rng.normal(size=(64, 4)), rng.normal(size=(64, 1)))


if __name__ == "__main__":
    import lockstep

    found = lockstep.verify(*build(), devices=2, steps=3)
    print(found)
    assert found.equal, found.cause
    assert found.rounding > 1e-5
    assert len(found.differences) > 300
