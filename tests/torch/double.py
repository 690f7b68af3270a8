"""Keras in double precision: in double, equal is 1e-10, and rounding hides no fault.

Importing this module changes the process. The processes of a pool import it with a model
that carries `InDouble`.
"""

import keras
from keras.src.backend.common import dtypes

# On PyTorch, Keras takes float32 for the moments of batch norm, for losses and for metrics.
dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
keras.config.set_floatx("float64")

BOUND = 1e-10
"""The largest difference between two runs of at most 100 steps."""


class InDouble:
    """An attribute of a model. It is pickled by the name of this module, which is imported."""


def in_double(model):
    """The same model, which takes its processes to double precision."""
    model.in_double = InDouble()
    return model
