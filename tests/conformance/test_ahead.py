"""On accelerators each batch is on its way before the step of the batch before it begins.

CPUs stand for them here: what is compared is every bit, and what is drawn.
"""

import contextlib

import keras
import numpy as np
import pytest

import lockstep
from lockstep.engines.jax.fit.mesh_batches import MeshIterator
from lockstep.engines.jax.steps.programs import Programs
from lockstep.training.input import BatchesAhead
from tests.conformance import common
from tests.conformance.common import assert_same, compile_, model, weights
from tests.conformance.side_by_side import BATCH, smooth
from tests.conformance.test_callback_hooks import everything

X, Y = common.data(7 * BATCH)


@pytest.fixture
def ahead(monkeypatch):
    """The devices of this test count as accelerators."""
    prepared = Programs.__init__

    def prepare(self, *given):
        prepared(self, *given)
        self.ahead = BatchesAhead(self._shard)
        self.draws_ahead = True

    monkeypatch.setattr(Programs, "__init__", prepare)


class Items(keras.utils.PyDataset):
    """Seven batches; notes when each is drawn."""

    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def __len__(self):
        return 7

    def __getitem__(self, index):
        self.notes.append(("drawn", index))
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], Y[rows]


class Notes(keras.callbacks.Callback):
    """Notes what was done in which order."""

    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def on_train_begin(self, logs=None):
        self.notes.clear()

    def on_train_batch_end(self, batch, logs=None):
        self.notes.append(("done", batch))


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("devices", [1, 4])
def test_each_batch_is_drawn_before_the_step_of_the_one_before_it(devices):
    notes = []
    made = lockstep.distribute(smooth(), devices)
    made.fit(Items(notes), shuffle=False, verbose=0, callbacks=[Notes(notes)])
    done = [position for position, (what, _) in enumerate(notes) if what == "done"]
    drawn = [sum(what == "drawn" for what, _ in notes[:position]) for position in done]
    assert drawn == [2, 3, 4, 5, 6, 7, 7]
    assert made.train_function.run._cache_size() == 1  # one program, wherever batches come from
    right = smooth()
    right.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_same(weights(made), weights(right))


class Killed(BaseException):
    """Stands for the end of a process."""


class Kill(keras.callbacks.Callback):
    """Ends the run after this step."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations.value == self.step:
            raise Killed

    def get_state(self):
        return None

    def set_state(self, state):
        pass


def trained(devices, folder):
    """All that a run leaves that resumes within an epoch, and then has a generator."""
    for last in (9, None):  # within the second epoch
        made = model(compiled=False)
        compile_(made)
        lockstep.distribute(made, devices)
        np.random.seed(3)
        x, y = common.data()
        checkpoint = lockstep.Checkpoint(folder, steps=2, background=False)
        kept = {"batch_size": 7, "verbose": 0, "validation_data": (X, Y)}
        with contextlib.suppress(Killed):
            made.fit(x, y, epochs=4, **kept, callbacks=[checkpoint, Kill(last)])
    endless = ((x[i % 40 : i % 40 + 9], y[i % 40 : i % 40 + 9]) for i in range(100))
    made.fit(endless, steps_per_epoch=4, epochs=2, shuffle=False, verbose=0)
    left = len(list(endless))
    predicted = made.predict(x, batch_size=7, verbose=0)
    evaluated = made.evaluate(x, y, batch_size=7, verbose=0)
    return left, predicted, evaluated, everything(made)


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 4])
def test_no_bit_depends_on_when_a_batch_is_drawn(devices, request, tmp_path):
    in_turn = trained(devices, tmp_path / "in turn")
    request.getfixturevalue("ahead")
    assert_same(trained(devices, tmp_path / "ahead"), in_turn, atol=0)


@pytest.mark.parametrize(
    ("is_ahead", "watched", "shared"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_rows_are_copied_where_code_may_write_into_them(is_ahead, watched, shared):
    batches = MeshIterator(x=X, batch_size=BATCH, shuffle=False)
    batches.ahead = BatchesAhead(lambda batch: batch) if is_ahead else None
    batches.draws_ahead = is_ahead
    batches.watch(watched)
    drawn = [leaf for *_, iterator in batches for leaf in keras.tree.flatten(next(iterator))]
    assert np.array_equal(np.concatenate(drawn), X)
    assert [np.shares_memory(leaf, X) for leaf in drawn] == [shared] * 7
