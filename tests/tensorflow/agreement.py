"""The shared cases on TensorFlow: which runs, and what equal is."""

import warnings
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import pytest

import lockstep
from lockstep.errors import UnsplitBatchWarning
from tests.conformance.cases import FAMILIES
from tests.conformance.cases.case import bounds, gaps, play

COUNTS = [1, 2, 3, 4]

DRAWS = {
    "Gaussian noise and Gaussian dropout",
    "alpha dropout",
    "random flips of images",
    "random numbers of a layer's own",
    "spatial and recurrent dropout",
}
"""Replicas draw for themselves; test_on_random_numbers.py says what holds of that."""

UNSTEADY = {"generator that does not end"}
"""Keras 3.15.1 on TensorFlow differs from itself on one device: in each epoch a reader
runs ahead of the validation steps, as far as it happens to, and the next goes on there."""

IN_HALVES = {"mixed_float16, loss scaled": 2.0**-10}
"""Each replica rounds its share of a gradient to half precision, and one device the whole.
The control, which turns the rows of a batch round, does not round anew: the bound is the
relative distance of two numbers of float16."""


def runs(sample):
    """Every case on every number of devices; `sample` names those of the fixed sample."""
    unknown = set(sample) - {name for cases in FAMILIES.values() for name in cases}
    assert not unknown
    return [
        pytest.param(
            family,
            name,
            devices,
            id=f"{name}-{devices}",
            marks=[] if sample.get(name) == devices else [pytest.mark.whole],
        )
        for family, cases in FAMILIES.items()
        for name in cases
        if name not in DRAWS | UNSTEADY
        for devices in COUNTS
    ]


def assert_agrees(family, name, devices):
    """A case over so many devices leaves what it leaves on one, by Keras alone."""
    case = case_of(family, name)
    one, allowed = _truth(family, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsplitBatchWarning)
        many = play(case, partial(lockstep.distribute, devices=devices))
    allowed = {key: max(bound, IN_HALVES.get(name, 0)) for key, bound in allowed.items()}
    far = {key: (g, allowed[key]) for key, g in gaps(one, many).items() if not g <= allowed[key]}
    assert not far, f"apart by, and allowed: {far}"


def case_of(family, name):
    """The case, without the random numbers that replicas draw for themselves."""
    case = FAMILIES[family][name]
    return case if case.make_plain is None else replace(case, make=case.make_plain, make_plain=None)


@lru_cache(maxsize=2)
def _truth(family, name):
    case = case_of(family, name)
    one = play(case)
    assert all(np.all(np.isfinite(value.astype("float64"))) for value in one.values())
    return one, bounds(case, one)
