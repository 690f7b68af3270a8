"""Layers that see the whole batch, hold state or draw are those of one device."""

import pytest

from tests.conformance.agreement import assert_agrees, runs


@pytest.mark.parametrize(("family", "case", "devices"), runs("Layers"))
def test_n_devices_equal_one(family, case, devices):
    assert_agrees(family, case, devices)
