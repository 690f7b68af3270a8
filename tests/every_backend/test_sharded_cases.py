"""The promise once more, with `state="sharded"`: each device has a part of each variable.

`python -m pytest tests/every_backend/test_sharded_cases.py --whole` runs every case.
"""

import pytest

from tests.conformance.cases import FAMILIES
from tests.conftest import BACKEND
from tests.every_backend.test_cases import EXCLUDED

DEVICES = {"jax": [2, 3, 4, 8], "torch": [2, 3]}

SAMPLE = {
    "jax": {
        "attention, adamw": 4,
        "added losses, adamw": 8,
        "global_clipnorm": 4,
        "Adafactor": 8,
        "Muon": 4,
        "mixed_float16, loss scaled": 2,
        "LoRA, an own step": 3,
    },
    "torch": {"added losses, adamw": 3, "mixed_float16, loss scaled": 3},
}
"""The quick cases, each with a number of devices."""


def _runs():
    cases = [(family, name) for family, named in FAMILIES.items() for name in named]
    for family, name in cases:
        for devices in DEVICES[BACKEND]:
            if name not in EXCLUDED.get(BACKEND, ()):
                marks = [] if SAMPLE[BACKEND].get(name) == devices else [pytest.mark.whole]
                yield pytest.param(family, name, devices, marks=marks)


@pytest.mark.parametrize(("family", "name", "devices"), list(_runs()))
def test_n_devices_with_sharded_state_equal_one(worker, family, name, devices):
    far = worker.difference(family, name, devices, state="sharded")
    assert not far, f"beyond the bound: {far}"
