"""The promise once more, with `state="sharded"` on JAX: each device has a part of each variable.

`python -m pytest tests/conformance/test_sharded_cases.py --whole` runs every case.
"""

import pytest

from tests.conformance.cases import FAMILIES

DEVICES = [2, 3, 4, 8]

SAMPLE = {
    "attention, adamw": 4,
    "added losses, adamw": 8,
    "global_clipnorm": 4,
    "Adafactor": 8,
    "Muon": 4,
    "mixed_float16, loss scaled": 2,
}
"""The cases of every test run, each with a number of devices."""


def _runs():
    for family, named in FAMILIES.items():
        for name in named:
            for devices in DEVICES:
                marks = [] if SAMPLE.get(name) == devices else [pytest.mark.whole]
                yield pytest.param(family, name, devices, marks=marks)


@pytest.mark.parametrize(("family", "name", "devices"), list(_runs()))
def test_n_devices_with_sharded_state_equal_one(workers, family, name, devices):
    far = workers("jax").difference(family, name, devices, state="sharded")
    assert not far, f"beyond the bound: {far}"
