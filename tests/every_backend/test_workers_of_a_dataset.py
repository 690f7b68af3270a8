"""A `PyDataset` whose workers make batches ready: each row once and in order, in each call."""

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from tests.tiers import rest

BATCHES, ROWS = 24, 5  # more batches than the queue of the workers holds
TOTAL = BATCHES * ROWS


class Numbered(keras.utils.PyDataset):
    """Rows whose value is their number, counted in each pass or without an end."""

    def __init__(self, ends=True, **kwargs):
        super().__init__(workers=2, **kwargs)
        self.ends = ends

    @property
    def num_batches(self):
        return BATCHES if self.ends else None

    def __getitem__(self, number):
        first = number % BATCHES * ROWS
        rows = np.arange(first, first + ROWS, dtype="float32")[:, None]
        return rows, rows


class Unbuilt(keras.Model):
    """Returns its input; the weight gets no gradient."""

    def __init__(self):
        super().__init__()
        self.scale = layers.Dense(1, use_bias=False, kernel_initializer="ones")

    def call(self, x):
        return self.scale(x)


def mean_of_targets(y_true, y_pred):
    return y_true[:, 0] + 0.0 * y_pred[:, 0]


def model(built=False, devices=2):
    keras.utils.clear_session(free_memory=False)
    made = Unbuilt()
    if built:
        made(np.zeros((1, 1), "float32"))
    made.compile(keras.optimizers.SGD(0.0), mean_of_targets)
    return lockstep.distribute(made, devices)


class Means(keras.callbacks.Callback):
    """Notes the number of the batch of each step: a step returns the mean of the epoch so far."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append([])
        self.sum = 0.0

    def on_train_batch_end(self, batch, logs=None):
        total = float(logs["loss"]) * (batch + 1)
        self.epochs[-1].append(round((total - self.sum - (ROWS - 1) / 2) / ROWS))
        self.sum = total


IN_ORDER = [*range(BATCHES)]


@pytest.mark.parametrize("kept", [False, *rest(True)])
@pytest.mark.parametrize("built", [False, *rest(True)])
def test_each_epoch_has_each_batch_once_and_in_order(built, kept, tmp_path):
    seen = Means()
    callbacks = [seen, lockstep.Checkpoint(tmp_path, background=False)] if kept else [seen]
    made = model(built)
    history = made.fit(
        Numbered(),
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        validation_data=Numbered(),
        validation_steps=None if kept else 18,
    ).history
    assert seen.epochs == [IN_ORDER] * 2
    held_out = TOTAL if kept else 18 * ROWS
    assert history["val_loss"] == pytest.approx([(held_out - 1) / 2] * 2, rel=1e-5)
    lockstep.release(made)


def test_the_first_evaluate_has_each_row_once():
    made = model()
    losses = [made.evaluate(Numbered(), verbose=0) for _ in range(2)]
    assert losses == pytest.approx([(TOTAL - 1) / 2] * 2, rel=1e-5)
    lockstep.release(made)


def test_the_first_predict_has_each_row_once_and_in_order(tmp_path):
    rows = np.arange(TOTAL, dtype="float32")
    for to_file in (False, True):
        made = model()
        if to_file:
            found = np.load(lockstep.predict(made, Numbered(), tmp_path / "p.npy", verbose=0))
        else:
            found = made.predict(Numbered(), verbose=0)
        np.testing.assert_array_equal(found[:, 0], rows)
        lockstep.release(made)


def test_data_without_an_end_begin_with_their_first_batch():
    seen = Means()
    made = model()
    made.fit(Numbered(ends=False), steps_per_epoch=18, shuffle=False, verbose=0, callbacks=[seen])
    assert seen.epochs == [IN_ORDER[:18]]
    lockstep.release(made)
