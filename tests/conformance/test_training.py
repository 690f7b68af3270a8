"""The promise: one training run over N devices equals that run on one device."""

import numpy as np
import pytest

from tests.conformance.truth import distances, rounding, run
from tests.conformance.zoo import ZOO

COUNTS = [1, 2, 3, 4, 8]
BOUND = 1e-5


def _cases():
    for position, (name, case) in enumerate(ZOO.items()):
        # The fixed sample: every model once, with one count in turn, and one with its last
        # optimizer, which has to be measured against what one device differs from itself.
        sample = (case.optimizers[-1 if position == 3 else 0], COUNTS[position % 5])
        for optimizer in case.optimizers:
            for devices in COUNTS:
                marks = [pytest.mark.xdist_group(f"{name}-{optimizer}")]
                if (optimizer, devices) != sample:
                    marks.append(pytest.mark.whole)
                yield pytest.param(name, optimizer, devices, marks=marks)


@pytest.mark.parametrize(("name", "optimizer", "devices"), list(_cases()))
def test_n_devices_equal_one(name, optimizer, devices):
    one = run(name, optimizer, None)
    many = run(name, optimizer, devices)

    bounds = dict.fromkeys(one.variables, BOUND)
    outputs = [BOUND] * len(one.predicted)
    if optimizer != "sgd":
        variables, predicted = rounding(name, optimizer)
        bounds |= {path: max(BOUND, 10 * d) for path, d in variables.items()}
        outputs = [max(BOUND, 10 * d) for d in predicted]  # which follow from the variables
    far = {
        path: distance
        for path, distance in distances(one.variables, many.variables).items()
        if not distance <= bounds[path]
    }
    assert not far

    assert one.history.keys() == many.history.keys()
    for key in one.history:
        np.testing.assert_allclose(many.history[key], one.history[key], rtol=0, atol=BOUND)
    assert one.evaluated.keys() == many.evaluated.keys()
    for key in one.evaluated:
        assert many.evaluated[key] == pytest.approx(one.evaluated[key], rel=0, abs=BOUND)
    for mine, theirs, bound in zip(many.predicted, one.predicted, outputs, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=bound)
