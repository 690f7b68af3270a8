"""Settings as a script has them in a module of its own, and layers that read them."""

import collections
import enum
from functools import partial

import keras

ALPHA = 1.0
OPTIONS = {"scale": 1.0}
TABLE = keras.ops.convert_to_tensor([0.0, 0.0, 0.0])


def activation(x):
    return x


class Options:
    """Options in an object."""

    def __init__(self):
        self.scale = 1.0


options = Options()
scaled = partial(keras.ops.multiply, 1.0)


class Scale(keras.layers.Layer):
    """Reads what the module and the class hold."""

    factor = 1.0

    def call(self, x):
        x = x * ALPHA * OPTIONS["scale"] * options.scale * self.factor
        return scaled(self.shifted(activation(x))) + TABLE

    def shifted(self, x):
        return x


class Hub(keras.Model):
    """A functional model made by a class of a module, as every model of KerasHub is."""

    def __init__(self, width, **options):
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(width, activation="tanh")(inputs)
        super().__init__(inputs=inputs, outputs=keras.layers.Dense(2)(hidden), **options)


class DeeperHub(Hub):
    """Keras changes the bases of each class on the way to `keras.Model`."""


class Mode(enum.Enum):
    DOUBLE = 2.0


class ByName(dict):
    """Fails with a KeyError for a name that it does not have."""

    __getattr__ = dict.__getitem__


LIMITS = ByName(low=0.5)


class Terms(keras.layers.Layer):
    """Adds up what is in a dict that keeps its order."""

    def __init__(self):
        super().__init__()
        self.terms = collections.OrderedDict(a=0.0)

    def call(self, x):
        return x * Mode.DOUBLE.value + LIMITS.low * sum(self.terms.values())
