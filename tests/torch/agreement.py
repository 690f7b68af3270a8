"""What the tests on PyTorch share: a run by Keras alone, one on several devices, and equality."""

import keras
import numpy as np

import lockstep
from tests.torch.double import BOUND


def both(build, devices=3, **options):
    """Two models of one seed: one for Keras alone, one on several devices."""
    made = []
    for _ in range(2):
        keras.utils.clear_session(free_memory=False)  # the same names
        keras.utils.set_random_seed(11)
        made.append(build())
    return made[0], lockstep.distribute(made[1], devices, **options)


def assert_equal(a, b):
    """Two models, or two results, are equal in double precision."""
    if isinstance(a, keras.Model):
        a, b = values(a), values(b)
    keras.tree.map_structure(_assert_close, a, b)


def values(model):
    """The weights, and the state of the optimizer if there is one."""
    slots = model.optimizer.variables if model.optimizer is not None else []
    return [keras.ops.convert_to_numpy(variable.value) for variable in [*model.variables, *slots]]


def _assert_close(a, b):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=BOUND)
