"""A run that was cut anywhere and goes on ends as one that was not cut."""

import contextlib
import gc
import tempfile
import warnings
from functools import cache

import pytest

from lockstep.errors import CheckpointWarning
from tests.checkpoints.data import SOURCES
from tests.checkpoints.runs import assert_same_end, train

KNOWN = "Your input ran out of data"  # of data that does not say its length, as without a cut


@contextlib.contextmanager
def costly_skipping_is_said(name):
    if name == "generator":
        with pytest.warns(CheckpointWarning, match="made once more"):
            yield
    else:
        yield


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=KNOWN)
        yield
    gc.collect()  # the threads of Grain end with its iterators


@cache
def truth_of(name):
    """What a run leaves that is not cut, and has no checkpoint.

    Where a PyDataset has workers, Keras alone begins with batches that they had made ready for
    its look at the first one, in an order of chance; with a checkpoint these are left out.
    """
    if name != "py_dataset_with_workers":
        return train(SOURCES[name])
    with tempfile.TemporaryDirectory() as folder:
        return train(SOURCES[name], folder)


WHOLE = pytest.mark.whole
SAMPLE = ["arrays", "py_dataset", "tf_data", "torch_loader", "grain_dataset", "generator"]
BETWEEN = ["py_dataset_with_state", "tf_data"]


def cases():
    """Every kind of data, cut in three places; the fixed sample has some kinds, cut in one."""
    for name in SOURCES:
        for cut in (10, 3, 7, 11):
            sampled = cut == 10 and name in SAMPLE
            yield pytest.param(name, cut, marks=[] if sampled else WHOLE)


@pytest.mark.parametrize(("name", "cut"), list(cases()))
def test_every_kind_of_data_goes_on_where_it_was(name, cut, tmp_path):
    train(SOURCES[name], tmp_path, cut=cut, checkpoint={"steps": 1, "background": False})
    with costly_skipping_is_said(name):
        assert_same_end(train(SOURCES[name], tmp_path), truth_of(name))


@pytest.mark.parametrize(
    "name", [n if n in BETWEEN else pytest.param(n, marks=WHOLE) for n in SOURCES]
)
def test_every_kind_of_data_goes_on_between_two_epochs(name, tmp_path):
    train(SOURCES[name], tmp_path, epochs=2, checkpoint={})
    with costly_skipping_is_said(name):
        assert_same_end(train(SOURCES[name], tmp_path, checkpoint={}), truth_of(name))
