"""A run that a callback has stopped says so, and how it goes on."""

import keras
import numpy as np
import pytest

from lockstep.checkpoint.run_folder import RunFolder
from lockstep.errors import CheckpointWarning
from tests.checkpoints.data import arrays
from tests.checkpoints.runs import assert_same_end, train


class Stateless(keras.callbacks.Callback):
    def get_state(self):
        return None

    def set_state(self, state):
        pass


class TwoEpochs(Stateless):
    """As one that looks at the time that a job has."""

    def on_train_begin(self, logs=None):
        self.left = 2

    def on_epoch_end(self, epoch, logs=None):
        self.left -= 1
        if self.left == 0:
            self.model.stop_training = True


def test_a_time_limit_is_named_and_without_it_the_run_goes_on(tmp_path):
    train(arrays, tmp_path, callbacks=[TwoEpochs], checkpoint={})
    with pytest.warns(
        CheckpointWarning, match="TwoEpochs stopped the run of .* after 2 of 3 epochs"
    ) as told:
        history, _ = train(arrays, tmp_path, callbacks=[TwoEpochs], checkpoint={})
    assert len(history["loss"]) == 2
    text = str(told[-1].message)
    assert "remove TwoEpochs from callbacks" in text
    assert len(text.splitlines()) <= 3
    with pytest.warns(
        CheckpointWarning, match="TwoEpochs is in the checkpoint, but not in this fit"
    ):
        mine = train(arrays, tmp_path, checkpoint={})
    assert_same_end(mine, train(arrays))


class Blow(Stateless):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.set_weights([np.full_like(w, np.nan) for w in self.model.get_weights()])


def test_no_number_stops_and_leaves_one_to_go_back_to(tmp_path):
    callbacks = [Blow, keras.callbacks.TerminateOnNaN]
    train(arrays, tmp_path, callbacks=callbacks, checkpoint={"keep": 1})
    newest, before = RunFolder(tmp_path).checkpoints()
    assert before.name.endswith("epoch-0001-step-000000")
    with pytest.warns(
        CheckpointWarning, match="TerminateOnNaN stopped the run of .* after 2 of 3 epochs"
    ):
        train(arrays, tmp_path, callbacks=callbacks, checkpoint={"keep": 1})
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    with pytest.warns(CheckpointWarning, match="Blow is in the checkpoint, but not in this fit"):
        mine = train(arrays, tmp_path, callbacks=callbacks[1:], checkpoint={"keep": 1})
    assert_same_end(mine, train(arrays))
