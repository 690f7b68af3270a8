"""On an accelerator the next batches are drawn and placed before the callbacks of a step."""

import keras
import numpy as np
import pytest

import lockstep
from tests.conformance import common
from tests.conformance.agreement import assert_agrees
from tests.conformance.common import assert_same, compile_, model, weights
from tests.conformance.side_by_side import BATCH, smooth
from tests.conformance.test_callback_hooks import everything

X, Y = common.data(7 * BATCH)


class Items(keras.utils.PyDataset):
    """Seven batches, one of which may fail; notes when each is asked for."""

    def __init__(self, notes, fails=None):
        super().__init__()
        self.notes, self.fails = notes, fails

    def __len__(self):
        return 7

    def __getitem__(self, index):
        self.notes.append(("drawn", index))
        if index == self.fails:
            raise OSError("the disk is gone")
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], Y[rows]


class Notes(keras.callbacks.Callback):
    """Looks at every loss, and notes when."""

    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def on_train_begin(self, logs=None):
        self.notes.clear()

    def on_train_batch_begin(self, batch, logs=None):
        self.notes.append(("begun", batch))

    def on_train_batch_end(self, batch, logs=None):
        assert logs["loss"] > 0
        self.notes.append(("done", batch))

    def get_state(self):
        return None

    def set_state(self, state):
        pass


class StopsEpochs(keras.callbacks.Callback):
    """Stops every epoch after its second step."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 1

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = False


def drawn_before_done(notes):
    """How many batches were drawn when each step was done."""
    return [
        sum(what == "drawn" for what, _ in notes[:position])
        for position, (what, _) in enumerate(notes)
        if what == "done"
    ]


@pytest.mark.parametrize("devices", [1, 4])
def test_the_next_batch_is_drawn_before_the_callbacks_of_a_step(devices, ahead):
    notes = []
    made = lockstep.distribute(smooth(), devices)
    made.fit(Items(notes), shuffle=False, verbose=0, callbacks=[Notes(notes)])
    in_turn = [1, 2, 3, 4, 5, 6, 7]
    assert drawn_before_done(notes) == ([2, 3, 4, 5, 6, 7, 7] if ahead else in_turn)
    assert made.train_function.run._cache_size() == 1  # one program, wherever batches come from
    right = smooth()
    right.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_same(weights(made), weights(right))


@pytest.mark.parametrize(("devices", "times"), [(1, 1), (4, 3)])
def test_no_bit_depends_on_when_a_batch_is_drawn(devices, times, monkeypatch):
    def train(ahead):
        monkeypatch.setattr("lockstep.engines.jax.steps.steps.looks_ahead", lambda _: ahead)
        made = model(compiled=False)
        compile_(made)
        made.steps_per_execution = times
        return every_bit(lockstep.distribute(made, devices))

    assert_same(train(ahead=True), train(ahead=False), atol=0)


def every_bit(made):
    """All that comes of arrays and a generator, with a callback that looks at every loss."""
    np.random.seed(3)
    x, y = common.data()
    options = {"verbose": 0, "callbacks": [Notes([])]}
    made.fit(x, y, batch_size=7, epochs=2, validation_data=(X, Y), **options)
    endless = ((x[i % 40 : i % 40 + 9], y[i % 40 : i % 40 + 9]) for i in range(100))
    made.fit(endless, steps_per_epoch=4, epochs=2, shuffle=False, **options)
    left = len(list(endless))
    predicted = made.predict(x, batch_size=7, verbose=0)
    evaluated = made.evaluate(x, y, batch_size=7, verbose=0)
    return left, predicted, evaluated, everything(made), np.random.random()


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("steps", [None, 5])
def test_an_epoch_that_was_stopped_leaves_nothing_to_the_next_but_its_own_data(steps):
    found = []
    for devices in (None, 3):
        made = smooth()
        if devices:
            lockstep.distribute(made, devices)
        data = [(X[i * BATCH :][:BATCH], Y[i * BATCH :][:BATCH]) for i in range(7)]
        given = {"x": iter_of(data), "steps_per_epoch": steps} if steps else {"x": X, "y": Y}
        given |= {"shuffle": False} | ({} if steps else {"batch_size": BATCH})
        made.fit(**given, epochs=3, verbose=0, callbacks=[StopsEpochs()])
        found.append(weights(made))
    assert_same(found[1], found[0])


def iter_of(batches):
    yield from batches


def test_what_fails_ahead_is_told_in_its_turn(ahead):
    notes = []
    made = lockstep.distribute(smooth(), 4)
    with pytest.raises(OSError, match="the disk is gone"):
        made.fit(Items(notes, fails=3), shuffle=False, verbose=0, callbacks=[Notes(notes)])
    assert [number for what, number in notes if what == "done"] == [0, 1, 2]
    assert (notes.index(("drawn", 3)) < notes.index(("done", 2))) == ahead
    right = smooth()
    right.fit(X[: 3 * BATCH], Y[: 3 * BATCH], batch_size=BATCH, shuffle=False, verbose=0)
    assert_same(weights(made), weights(right))


@pytest.mark.usefixtures("ahead")
def test_under_a_checkpoint_every_batch_is_drawn_in_its_turn(tmp_path):
    notes = []
    made = lockstep.distribute(smooth(), 2)
    callbacks = [Notes(notes), lockstep.Checkpoint(tmp_path / "run")]
    made.fit(Items(notes), shuffle=False, verbose=0, callbacks=callbacks)
    assert drawn_before_done(notes) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_a_source_that_does_not_know_its_end_gives_what_it_gives_one_device(monkeypatch):
    monkeypatch.setattr("lockstep.engines.jax.steps.steps.looks_ahead", lambda _: True)
    assert_agrees("Data", "generator of changing batch sizes", 4)
