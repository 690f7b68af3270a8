"""Data as users have it: what a checkpoint must not touch, and what it has to notice."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from lockstep.checkpoint import data_states
from lockstep.errors import CheckpointError
from tests.checkpoints.data import Reordered, arrays
from tests.checkpoints.runs import assert_same_end, train
from tests.conformance import common


class ReorderedFirst(Reordered):
    """Orders its batches anew before each epoch."""

    def on_epoch_begin(self):
        self.on_epoch_end()


def with_a_state():
    return {"x": ReorderedFirst(), "shuffle": False, "steps_per_epoch": 7}


def that_wrap():
    return {**arrays(), "steps_per_epoch": 4, "epochs": 5}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(("source", "cut"), [(that_wrap, 7), (that_wrap, 5), (with_a_state, 10)])
def test_what_the_beginning_of_an_epoch_draws_is_drawn_once(source, cut, tmp_path):
    """With steps_per_epoch, where a pass goes on from one epoch to the next."""

    def drawing():
        return keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: np.random.rand())

    truth = train(source, callbacks=[drawing])
    saving = {"steps": 1, "background": False}
    train(source, tmp_path, cut=cut, callbacks=[drawing], checkpoint=saving)
    assert_same_end(train(source, tmp_path, callbacks=[drawing]), truth)


class Shuffling(Reordered):
    """Orders its batches in place, in what it gives away and is given as its state."""

    def on_epoch_end(self):
        self.rng.shuffle(self.order)

    def __getitem__(self, index):
        batch = super().__getitem__(index)
        self.order[:] = np.roll(self.order, 1)
        return batch

    def get_state(self):
        return {"order": self.order, "rng": self.rng.bit_generator.state}

    def set_state(self, state):
        self.order, self.rng.bit_generator.state = state["order"], state["rng"]


def test_data_that_gives_its_own_arrays_away_as_its_state(tmp_path):
    def source():
        return {"x": Shuffling(), "shuffle": False}

    train(source, tmp_path, cut=10, checkpoint={"steps": 1, "background": False})
    assert_same_end(train(source, tmp_path), train(source))


def test_a_stream_of_pytorch_s_that_knows_its_length(tmp_path):
    import torch

    class Stream(torch.utils.data.IterableDataset):
        def __len__(self):
            return 49

        def __iter__(self):
            return iter(zip(*common.data(49), strict=True))

    def source():
        return {"x": torch.utils.data.DataLoader(Stream(), 7), "epochs": 1}

    assert_same_end(train(source, tmp_path), train(source))


def test_numbers_of_numpy_are_numbers(tmp_path):
    def source():
        numbers = {"batch_size": np.int64(7), "steps_per_epoch": np.int64(7)}
        return {**arrays(), **numbers, "shuffle": np.bool_(True)}

    truth = train(source)
    train(source, tmp_path, cut=10)
    assert_same_end(train(source, tmp_path), truth)


class Framed:
    """A table of pandas, in the little that is asked of it: rows have names, not numbers."""

    shape, dtypes = (49, 4), ["float32"] * 4

    def __init__(self):
        self.iloc = common.data(49)[0]

    def __getitem__(self, name):
        raise KeyError(name)


def test_the_rows_of_a_table_are_those_of_its_values():
    assert data_states._check_of_rows(Framed()) == data_states._check_of_rows(common.data(49)[0])
    assert data_states._type_of(Framed()) == "float32"


def test_what_cannot_be_written_down_is_told_before_training():
    batches = SimpleNamespace(
        data_adapter=SimpleNamespace(num_batches=np.array([7, 7])), steps_per_epoch=None
    )
    with pytest.raises(CheckpointError, match="cannot be saved"):
        data_states.fingerprint(batches)


def test_every_array_of_a_sparse_one_counts():
    import jax.numpy as jnp
    from jax.experimental.sparse import BCOO

    dense = np.eye(3, dtype="float32")
    batch = BCOO.fromdense(jnp.array(dense))
    others = [BCOO.fromdense(jnp.array(each)) for each in (2 * dense, dense[::-1])]
    assert data_states.checksum((batch,)) == data_states.checksum((BCOO.fromdense(dense),))
    assert len({data_states.checksum((each,)) for each in (batch, *others)}) == 3


def test_weights_that_are_left_out_count_as_none():
    x = np.ones((2, 3))
    assert data_states.checksum((x, x, None)) == data_states.checksum((x, x))
