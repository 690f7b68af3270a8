"""Small models, layers and data that several files of tests train."""

import keras
import numpy as np
from keras import layers


def chain(*inner, seed=3, optimizer=None, loss="mse", **options):
    """Two dense layers, with further ones between them; two calls give the same model."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    made = keras.Sequential([keras.Input((4,)), layers.Dense(6, "tanh"), *inner, layers.Dense(2)])
    made.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), loss, **options)
    return made


def features(rows=23, seed=1):
    """The rows and the targets of `chain`."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 4)), rng.normal(size=(rows, 2))


class Own(layers.Layer):
    """A layer of the user's own: it runs a function of the layer and its inputs."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, x):
        return self.function(self, x)

    def compute_output_shape(self, shape):
        return shape


class Stop(keras.callbacks.Callback):
    """Ends a run within an epoch, as a signal does."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            raise KeyboardInterrupt

    def get_state(self):
        return {}

    def set_state(self, state):
        """Have no state."""
