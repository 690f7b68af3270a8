"""A module of the user whose code reads values that lockstep does not list."""

import enum
import os

import keras

CENTER = False
__scale = 1.0


class Mode(enum.Enum):
    ONE = 1


Mode.ONE.factor = 1.0
keras.layers.Dense.scale_of_test = 1.0
keras.saving.get_custom_objects()["scale_of_test"] = 1.0


class Options:
    @classmethod
    def factor(cls):
        return 1.0


def of_class():
    return Options.factor()


def of_enum():
    return Mode.ONE.factor


def of_keras():
    return keras.layers.Dense.scale_of_test


def of_custom_objects():
    return keras.saving.get_custom_objects()["scale_of_test"]


def of_underscores():
    return __scale


READS = {
    "a class method": of_class,
    "a member of an enum": of_enum,
    "a class of Keras": of_keras,
    "custom objects": of_custom_objects,
    "a global of two underscores": of_underscores,
}


class Scaled(keras.layers.Layer):
    """Multiplies by what a function reads."""

    def __init__(self, read, **kwargs):
        super().__init__(**kwargs)
        self.read = read

    def call(self, x):
        return x * READS[self.read]()


class ReadsFile(keras.layers.Layer):
    """Multiplies by what a worker reads from a file."""

    def __init__(self, path, **kwargs):
        super().__init__(**kwargs)
        self.file, self.home = path, os.getpid()

    def call(self, x):
        return x * (2.0 if os.getpid() != self.home and os.path.exists(self.file) else 1.0)


class Center(keras.layers.Layer):
    """Mixes the rows if a global says so."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True) if CENTER else x * 1.0
