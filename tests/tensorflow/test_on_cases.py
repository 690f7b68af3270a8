"""N devices equal one: the cases that all engines share."""

import pytest

from tests.tensorflow.agreement import assert_agrees, runs

pytestmark = [
    # keras/src/trainers/epoch_iterator.py, of every source that does not tell its length
    pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning"),
]

SAMPLE = {
    "cnn, sgd": 2,
    "several inputs and outputs, adamw": 3,
    "subclassed, sgd": 4,
    "masked lstm, sgd": 3,
    "added losses, sgd": 2,
    "tf.data, unknown cardinality": 4,
    "generator of changing batch sizes": 3,
    "embedding mask and temporal weights": 4,
    "reduction mean_with_sample_weight": 3,
    "scalar custom loss (Dice)": 2,
    "in-batch contrastive loss": 4,
    "binary IoU, R2": 3,
    "batch norm": 4,
    "flipped batch": 3,
    "reshape with the batch size in it": 2,
    "counters, running maximum and mean": 3,
    "gradient accumulation over 3 steps": 4,
    "global_clipnorm": 3,
    "mixed_float16, loss scaled": 2,
    "steps_per_execution=3": 3,
    "run_eagerly=True": 2,
}


@pytest.mark.parametrize(("family", "case", "devices"), runs(SAMPLE))
def test_n_devices_equal_one(family, case, devices):
    assert_agrees(family, case, devices)
