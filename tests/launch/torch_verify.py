"""In each of two processes on PyTorch: `verify` of an exact model, and of one that is not."""

import os

import keras
import numpy as np
from keras import layers

import lockstep
import tests.torch.double  # noqa: F401  (double precision)


class Centred(layers.Layer):
    """Looks across the batch."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


def main():
    rank, _ = lockstep.initialize()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(23, 4)), rng.normal(size=(23, 2))
    for declared in (False, True):
        keras.utils.set_random_seed(7 + rank)
        centred = Centred(name="centred")
        if declared:  # wrongly, and the check of the first step does not see it
            os.environ["LOCKSTEP_CHECK"] = "0"
            lockstep.rowwise(centred)
        parts = [layers.Dense(5, "tanh"), layers.Dropout(0.4), layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((4,)), *parts, centred, layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        before = model.get_weights()
        found = lockstep.verify(model, (x, y), steps=5, batch_size=7)
        for mine, was in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(mine, was)
        print(found.verdict, len(found.devices), found.first_layer)
    print("the end")


if __name__ == "__main__":
    main()
