"""How a test compares several devices with one: two models of one seed, their values, the bound."""

import keras
import numpy as np

import lockstep

if keras.backend.backend() == "torch":
    import tests.torch.double  # noqa: F401  (rounding hides no fault)

BOUND = 1e-10 if keras.backend.backend() == "torch" else 1e-5
"""The largest difference that is rounding, of two runs of at most 100 steps."""


def both(build, devices=3, **options):
    """Two models of one seed: one for Keras alone, one on several devices."""
    return seeded(build), lockstep.distribute(seeded(build), devices, **options)


def seeded(build, seed=11):
    """A model with the same names and weights at each call."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    return build()


def assert_equal(a, b, bound=BOUND):
    """Two models, or two results, are equal but for rounding."""
    if isinstance(a, keras.Model):
        a, b = values(a), values(b)

    def assert_close(a, b):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=bound)

    keras.tree.map_structure(assert_close, a, b)


def values(model):
    """The weights, and the state of the optimizer if there is one; no later step changes them."""
    slots = model.optimizer.variables if model.optimizer is not None else []
    every = [*model.variables, *slots]
    return [np.array(keras.ops.convert_to_numpy(variable.value)) for variable in every]
