"""Every optimizer and every way to run a step is the same on N devices as on one."""

import pytest

from tests.conformance.agreement import assert_agrees, runs


@pytest.mark.parametrize(("family", "case", "devices"), runs("Optimizers, precision, steps"))
def test_n_devices_equal_one(family, case, devices):
    assert_agrees(family, case, devices)
