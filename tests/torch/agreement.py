"""What the tests on PyTorch share: a run by Keras alone, one on several devices, and equality."""

import warnings
from dataclasses import replace
from functools import lru_cache

import keras
import numpy as np

import lockstep
from lockstep.errors import UnsplitBatchWarning
from tests.conformance.cases import FAMILIES
from tests.conformance.cases.case import gaps, play
from tests.torch.double import BOUND, in_double


def assert_case_agrees(family, name, devices):
    """A shared case over so many devices leaves what it leaves on one, by Keras alone."""
    case, one = _truth(family, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsplitBatchWarning)
        many = play(case, lambda model: distributed(model, devices))
    far = {key: gap for key, gap in gaps(one, many).items() if not gap <= BOUND}
    assert not far, f"apart by: {far}"


def distributed(model, devices):
    return lockstep.distribute(in_double(model), devices)


def both(build, devices=3):
    """Two models of one seed: one for Keras alone, one on several devices."""
    made = []
    for _ in range(2):
        keras.utils.clear_session(free_memory=False)  # the same names
        keras.utils.set_random_seed(11)
        made.append(in_double(build()))
    return made[0], lockstep.distribute(made[1], devices)


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


@lru_cache(maxsize=2)
def _truth(family, name):
    case = FAMILIES[family][name]
    if case.make_plain is not None:  # replicas draw random numbers of their own
        case = replace(case, make=case.make_plain, make_plain=None)
    one = play(case)
    assert all(np.all(np.isfinite(value.astype("float64"))) for value in one.values())
    return case, one
