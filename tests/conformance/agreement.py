"""What the tests of every family of cases share: which runs, and what equal is."""

import contextlib
import gc
from functools import lru_cache, partial

import numpy as np
import pytest

import lockstep
from lockstep.errors import UnsplitBatchWarning
from tests.conformance.cases import FAMILIES
from tests.conformance.cases.case import bounds, gaps, play

COUNTS = [1, 2, 3, 4, 8]
LIKE_ANOTHER = [
    # number by number, as Adam and SGD are; and a type or a length that another case has
    *("Adamax", "Nadam", "RMSprop, centered", "Adagrad", "Adadelta", "Lion", "Ftrl"),
    *("mixed_bfloat16 with Adam", "steps_per_execution=2", "schedule: piecewise"),
    *("NumPy dict", "NumPy list", "tf.data, dict inputs", "tf.data, class_weight"),
    *("PyDataset", "Grain MapDataset", "generator that ends", "TensorFlow tensors"),
]
"""Cases that the fixed sample leaves out, because it has others that differ in less."""


def runs(family):
    """Every case on every number of devices; the fixed sample has most cases once."""
    return [
        pytest.param(family, name, devices, marks=_marks(position, name, devices))
        for position, name in enumerate(FAMILIES[family])
        for devices in COUNTS
    ]


def _marks(position, name, devices):
    sampled = COUNTS[1 + position % 4] == devices and name not in LIKE_ANOTHER
    group = pytest.mark.xdist_group(name)
    return [group] if sampled else [group, pytest.mark.whole]


def assert_agrees(family, name, devices):
    """A case over so many devices leaves what it leaves on one."""
    case = FAMILIES[family][name]
    one, allowed = _truth(family, name)
    uneven = case.unsplit and devices > 1
    said = pytest.warns(UnsplitBatchWarning) if uneven else contextlib.nullcontext()
    with said:
        many = play(case, partial(lockstep.distribute, devices=devices))
    far = {key: (g, allowed[key]) for key, g in gaps(one, many).items() if not g <= allowed[key]}
    gc.collect()  # the threads of Grain end with its iterators
    assert not far, f"apart by, and allowed: {far}"


@lru_cache(maxsize=2)
def _truth(family, name):
    """What one device leaves, by Keras alone, and how near another run has to be."""
    case = FAMILIES[family][name]
    one = play(case)
    assert all(np.all(np.isfinite(value.astype("float64"))) for value in one.values())
    return one, bounds(case, one)
