"""Every model of the zoo, with every kind of data, goes on where it was."""

import gc
import warnings

import pytest

from tests.checkpoints import zoo
from tests.checkpoints.runs import assert_same_end, train
from tests.conformance.zoo import ZOO

SAVING = {"steps": 1, "background": False}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        warnings.filterwarnings("ignore", message=".*of a generator .* drawn again")
        yield
    gc.collect()  # the threads of Grain end with its iterators


SAMPLE = [("masked_lstm", "tf_data", "sgd")]


def cases():
    """Every model with every kind of data, and with its other optimizer; a sample of one."""
    every = [(name, kind, "sgd") for name in ZOO for kind in zoo.KINDS]
    every += [(n, "arrays", o) for n, case in ZOO.items() for o in case.optimizers if o != "sgd"]
    for case in every:
        yield pytest.param(*case, marks=[] if case in SAMPLE else [pytest.mark.whole])


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kind", "optimizer"), list(cases()))
def test_every_model_goes_on_bit_for_bit_where_it_was(name, kind, optimizer, tmp_path):
    training = zoo.training(name, kind, optimizer)
    truth = train(**training, devices=3)
    train(**training, folder=tmp_path, cut=11, devices=3, checkpoint=SAVING)
    assert_same_end(train(**training, folder=tmp_path, devices=3), truth)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [n if n == "mlp" else pytest.param(n, marks=pytest.mark.whole) for n in ZOO]
)
def test_every_model_goes_on_on_other_devices(name, tmp_path):
    """Three parts of one run, on four devices, on one, and on eight."""
    training = zoo.training(name, "arrays")
    truth = train(**training, devices=8)
    for cut, devices in ((9, 4), (6, 1)):
        train(**training, folder=tmp_path, cut=cut, devices=devices, checkpoint=SAVING)
    assert_same_end(train(**training, folder=tmp_path, devices=8), truth, atol=1e-5)
