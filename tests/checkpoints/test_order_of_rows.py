"""Rows come in the order of the Keras that is installed, and a resumed run keeps that order."""

import keras
import numpy as np
import pytest
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

import lockstep
from lockstep.errors import CheckpointMismatch
from lockstep.training.arrays import row_numbers
from tests.checkpoints.data import arrays, arrays_by_batch, arrays_that_wrap
from tests.checkpoints.runs import assert_same_end, small, train, variables

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

SHUFFLES = [True, False, "batch"]


@pytest.fixture
def drawn_by_epoch(monkeypatch):
    """Keras 3.16's rule, whichever Keras is installed: the epoch seeds the order.

    keras/src/trainers/data_adapters/array_data_adapter.py, ArrayDataAdapter (Keras 3.16).
    """

    def _get_iterator(self, slice_and_convert_fn, inputs):
        epoch = self._epoch
        order = np.random.default_rng(epoch).permutation(self._num_samples)
        for number in range(self._size):
            start = number * self._batch_size
            stop = min(start + self._batch_size, self._num_samples)
            indices = order[start:stop]
            if self._shuffle == "batch":
                indices = np.random.default_rng(epoch + number).permutation(stop - start) + start
            yield keras.tree.map_structure(lambda x, i=indices: slice_and_convert_fn(x, i), inputs)

    def on_epoch_end(self):
        self._epoch += 1

    monkeypatch.setattr(ArrayDataAdapter, "_epoch", 0, raising=False)
    monkeypatch.setattr(ArrayDataAdapter, "_get_iterator", _get_iterator)
    monkeypatch.setattr(ArrayDataAdapter, "on_epoch_end", on_epoch_end)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_each_batch_has_the_rows_that_keras_s_adapter_yields(shuffle):
    adapter = ArrayDataAdapter(np.arange(23), batch_size=5, shuffle=shuffle)
    for epoch in range(3):
        np.random.seed(epoch)
        theirs = [keras.tree.flatten(batch)[0].tolist() for batch in adapter.get_jax_iterator()]
        assert len(theirs) == 5
        for skip in (0, 2, 5):
            np.random.seed(epoch)
            mine = [np.arange(23)[rows].tolist() for rows in row_numbers(adapter, skip)]
            assert mine == theirs[skip:]
        adapter.on_epoch_end()


@pytest.mark.parametrize("source", [arrays, arrays_by_batch, arrays_that_wrap])
def test_rows_follow_another_rule_of_keras_s_adapter(source, drawn_by_epoch):
    """A copy of the rule of Keras 3.15 trained on other rows than Keras 3.16 did."""
    found = []
    for distributed in (False, True):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        made = small()
        if distributed:
            lockstep.distribute(made, 1)
        keras.utils.set_random_seed(9)
        found.append((made.fit(**source(), epochs=3, verbose=0).history, variables(made)))
    assert_same_end(*found)


@pytest.mark.each_value_once
@pytest.mark.parametrize("source", [arrays, arrays_by_batch, arrays_that_wrap])
@pytest.mark.parametrize("cut", [4, 7, 10])
def test_a_resumed_run_has_the_rows_of_its_epoch(source, cut, drawn_by_epoch, tmp_path):
    truth = train(source)
    train(source, tmp_path, cut=cut, checkpoint={"steps": 1, "background": False})
    assert_same_end(train(source, tmp_path), truth)


def test_a_run_is_not_continued_under_another_rule(monkeypatch, tmp_path, request):
    """Half an epoch in one order and half in another would repeat rows and leave out others."""
    before = hasattr(ArrayDataAdapter(np.zeros(1)), "_epoch")
    if not before:
        train(arrays, tmp_path, cut=10)
        request.getfixturevalue("drawn_by_epoch")
    else:
        request.getfixturevalue("drawn_by_epoch")
        train(arrays, tmp_path, cut=10)
        monkeypatch.setattr("lockstep.checkpoint.data_states.epoch_of", lambda _: None)
    with pytest.raises(CheckpointMismatch, match="order drawn was "):
        train(arrays, tmp_path)
    assert lockstep.Checkpoint(tmp_path)
