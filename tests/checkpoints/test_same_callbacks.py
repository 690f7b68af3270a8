"""A state goes to the callback that it is of, and to no other; what is lost is named."""

import csv

import keras
import numpy as np
import pytest

from lockstep.checkpoint.callback_states import put_states, states_of
from lockstep.errors import CheckpointWarning
from tests.checkpoints.data import arrays
from tests.checkpoints.runs import assert_same_end, small, train


def test_weights_and_their_averages_change_places_as_often_as_they_would(tmp_path):
    """Between two epochs the averages are in the model, and the weights in the optimizer."""

    def make():
        made = small()
        made.compile(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9), "mse")
        return made

    options = {
        "make": make,
        "callbacks": [lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
    }
    truth = train(arrays, **options)
    train(arrays, tmp_path, cut=9, checkpoint={}, **options)
    assert_same_end(train(arrays, tmp_path, **options), truth)


def test_the_best_file_is_compared_with_right_after_going_on_within_an_epoch(tmp_path):
    def best(name):
        return lambda: keras.callbacks.ModelCheckpoint(
            tmp_path / name, "loss", save_best_only=True, save_weights_only=True, save_freq=7
        )

    truth = train(arrays, callbacks=[best("truth.weights.h5")])
    options = {"cut": 10, "checkpoint": {"steps": 1, "background": False}}
    train(arrays, tmp_path / "run", callbacks=[best("mine.weights.h5")], **options)
    mine = train(arrays, tmp_path / "run", callbacks=[best("mine.weights.h5")])
    assert_same_end(mine, truth)
    files = [small(), small()]
    for made, name in zip(files, ("truth", "mine"), strict=True):
        made.load_weights(tmp_path / f"{name}.weights.h5")
    for a, b in zip(files[0].get_weights(), files[1].get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------- which state is whose


def best(monitor, mode, folder="runs/1"):
    made = keras.callbacks.ModelCheckpoint(
        f"{folder}/{monitor}.weights.h5", monitor, save_weights_only=True, mode=mode
    )
    made.set_model(None)
    return made


def stopping(monitor, best=None):
    made = keras.callbacks.EarlyStopping(monitor, mode="min")
    made.best = best
    return made


def test_two_of_a_class_in_another_order_keep_what_is_theirs():
    loss, accuracy = best("loss", "min"), best("accuracy", "max")
    loss.best, accuracy.best = 2.0, 0.5
    states = states_of([loss, accuracy])
    for folder in ("runs/1", "runs/2"):  # a new folder for each job is the same callback
        others = [best("accuracy", "max", folder), best("loss", "min", folder)]
        assert put_states(others, states) == []
        assert [each.best for each in others] == [0.5, 2.0]


def test_a_value_of_another_monitor_is_not_taken():
    other = stopping("val_loss")
    words = put_states([other], states_of([stopping("loss", best=0.1)]))
    assert other.best is None
    assert words == [
        "EarlyStopping(monitor='val_loss', mode='min') is not in the checkpoint, and starts "
        "from its initial state",
        "EarlyStopping(monitor='loss', mode='min') is in the checkpoint, but not in this fit",
    ]


def test_a_state_that_says_its_class_alone_is_taken():
    """As checkpoints had it at first."""
    states = [{"class": "EarlyStopping", "state": {"best": 0.1, "wait": 2}}]
    callback = stopping("loss")
    assert put_states([callback], states) == []
    assert (callback.best, callback.wait) == (0.1, 2)


class Patient(keras.callbacks.EarlyStopping):
    def __init__(self):
        super().__init__("loss")
        self.above = 3
        self.best = 0.5


class PatientWithState(Patient):
    def get_state(self):
        return {"above": self.above}

    def set_state(self, state):
        self.above = state["above"]


class Counting(Patient):
    def on_epoch_end(self, epoch, logs=None):
        self.above += 1
        super().on_epoch_end(epoch, logs)


def test_a_subclass_that_may_have_a_state_of_its_own_is_named():
    assert put_states([Patient()], states_of([Patient()])) == []
    (words,) = put_states([Counting()], states_of([Counting()]))
    assert words == (
        "Counting has no get_state and set_state, so only the state of its Keras base class is "
        "restored"
    )


def test_with_two_methods_of_its_own_the_state_of_keras_s_class_goes_on_too():
    one, other = PatientWithState(), PatientWithState()
    one.above, one.best = 7, 0.25
    assert put_states([other], states_of([one])) == []
    assert (other.above, other.best) == (7, 0.25)


# ------------------------------------------------------------------------ rows in a file


def test_a_run_that_goes_on_says_so(tmp_path):
    loggers = []

    def logging(name):
        def make():
            loggers.append(keras.callbacks.CSVLogger(tmp_path / name))
            return loggers[-1]

        return [make]

    train(arrays, tmp_path / "run", cut=10, callbacks=logging("a.csv"), checkpoint={})
    loggers[0].csv_file.close()  # which Keras leaves open
    (tmp_path / "b.csv").write_text("precious\n" * 99)
    with pytest.warns(
        CheckpointWarning,
        match=r"b\.csv'\) is not in the checkpoint, and starts from its initial state",
    ):
        train(arrays, tmp_path / "run", callbacks=logging("b.csv"), epochs=2)
    text = (tmp_path / "b.csv").read_text()
    assert text.count("precious") == 99
    assert list(csv.reader(text.splitlines()))[-1][0] == "1"
