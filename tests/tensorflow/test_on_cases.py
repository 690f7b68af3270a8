"""N devices equal one: the cases that all engines share."""

import pytest

from tests.tensorflow.agreement import assert_agrees, runs
from tests.tensorflow.sample import SAMPLE

pytestmark = [
    # keras/src/trainers/epoch_iterator.py, of every source that does not tell its length
    pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning"),
]


@pytest.mark.parametrize(("family", "case", "devices"), runs(SAMPLE))
def test_n_devices_equal_one(family, case, devices):
    assert_agrees(family, case, devices)
