"""On PyTorch with `jit_compile=True`, N devices leave what one leaves without it, to 1e-10.

This runs all cases: `KERAS_BACKEND=torch python -m pytest tests/every_backend/test_traced_cases.py
--whole`. At least eight in ten have to run traced.
"""

import pytest

from tests.conformance.cases import FAMILIES
from tests.every_backend.test_cases import OF_JAX

DEVICES = (1, 3)
SAMPLE = {
    ("several inputs and outputs, adamw", 1),
    ("masked lstm, sgd", 1),
    ("embedding mask and temporal weights", 1),
    ("nested model, sgd", 3),
    ("counters, running maximum and mean", 3),
    ("bias before norm, sgd", 3),
}
"""The quick cases: dicts, draws in the order of memory, states, batch norm."""

REFUSED = {
    *OF_JAX,
    # Keras 3.15.1 on PyTorch refuses these, on one device too.
    *("steps_per_execution=2", "steps_per_execution=3", "steps_per_execution beyond the epoch"),
    "masking layer and row weights",
}


def _runs():
    for family, named in FAMILIES.items():
        for name in named:
            for devices in DEVICES if name not in REFUSED else ():
                marks = [] if (name, devices) in SAMPLE else [pytest.mark.whole]
                yield pytest.param(family, name, devices, marks=marks)


@pytest.fixture(scope="module")
def traced_cases():
    """Return a list that takes whether each case ran traced; most of them have to."""
    found = []
    yield found
    assert sum(found) >= 0.8 * len(found), f"{sum(found)} of {len(found)} cases were traced"


@pytest.mark.parametrize(("family", "name", "devices"), list(_runs()))
def test_traced_steps_equal_those_of_one_device(worker, traced_cases, family, name, devices):
    far = worker.difference(family, name, devices, traced=True)
    reasons = far.pop("not traced", None)
    traced_cases.append(reasons is None)
    assert (name, devices) not in SAMPLE or not reasons
    assert not far, f"beyond the bound: {far}"
