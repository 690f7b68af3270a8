"""N devices equal one: the cases that all engines share, in double precision."""

import pytest

from tests.sampling import rest
from tests.torch.agreement import assert_case_agrees

pytestmark = [
    # keras/src/trainers/epoch_iterator.py, of every source that does not tell its length
    pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning"),
]

SAMPLE = [
    ("Models", "cnn, sgd"),
    ("Models", "several inputs and outputs, adamw"),
    ("Models", "masked lstm, sgd"),
    ("Models", "added losses, sgd"),
    ("Losses and metrics", "embedding mask and temporal weights"),
    ("Losses and metrics", "reduction mean_with_sample_weight"),
    ("Losses and metrics", "scalar custom loss (Dice)"),
    ("Losses and metrics", "in-batch contrastive loss"),
    ("Losses and metrics", "add_loss over the batch"),
    ("Layers", "minibatch deviation"),
    ("Layers", "halves of the batch swapped"),
    ("Layers", "fixed batch_shape"),
    ("Layers", "counters, running maximum and mean"),
    ("Optimizers, precision, steps", "gradient accumulation over 3 steps"),
    ("Optimizers, precision, steps", "loss scaling in float32"),
    ("Optimizers, precision, steps", "trainable toggled between fits"),
    ("Data", "NumPy, class_weight"),
    *rest(
        ("Models", "shared layer, sgd"),
        ("Losses and metrics", "reduction sum"),
        ("Layers", "batch norm, frozen"),
        ("Layers", "attention over the batch"),
        ("Layers", "reshape with the batch size in it"),
        ("Optimizers, precision, steps", "global_clipnorm"),
        ("Data", "NumPy, validation_split"),
    ),
]


@pytest.mark.parametrize(("family", "name"), SAMPLE)
def test_n_devices_equal_one(family, name):
    assert_case_agrees(family, name, devices=3)
