"""What a `lockstep.Checkpoint` prints, with the numbers of epochs that Keras prints."""

import contextlib
import os
import re
import signal

import keras
import pytest

import lockstep
from lockstep.errors import CheckpointWarning
from tests.conformance.common import data, model


class Interrupts(keras.callbacks.Callback):
    def __init__(self, epoch, batch):
        super().__init__()
        self.at = (epoch, batch)

    def get_state(self):
        return {}

    def set_state(self, state):
        pass

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def trained(folder, *callbacks, verbose=2, **options):
    made = lockstep.distribute(model(), 2)
    x, y = data()
    checkpoint = lockstep.Checkpoint(folder, **options)
    made.fit(x, y, 10, epochs=2, verbose=verbose, callbacks=[*callbacks, checkpoint])


def test_a_signal_saves_and_says_what_to_do_next(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", Interrupts(1, 2))
    printed = capsys.readouterr().out
    assert "Epoch 2/2" in printed
    saved = f"lockstep: saved epoch 2, after step 3 to {tmp_path / 'run'}; "
    assert saved + "run the same command to resume\n" in printed
    # The page on checkpoints has a script with verbose=0, which printed nothing.
    trained(tmp_path / "run", Interrupts(None, None), verbose=0)
    printed = capsys.readouterr().out
    assert re.fullmatch(r"lockstep: resumes from .*: epoch 2, after step 3; .*\n", printed)


@pytest.mark.parametrize("how", ["no seed", "a seed", "a global seed", "behind other steps"])
def test_a_shuffle_without_a_seed_is_warned_of_before_it_trains(how, tmp_path):
    """The run trained to its end, or to a crash, and only the next start was refused."""
    import tensorflow as tf

    if how == "a global seed":
        keras.utils.set_random_seed(1)
    else:
        tf.random.set_seed(None)
    dataset = tf.data.Dataset.from_tensor_slices(data()).shuffle(
        53, seed=1 if how == "a seed" else None
    )
    if how == "behind other steps":
        dataset = dataset.map(lambda x, y: (x, y)).batch(10).prefetch(2)
    else:
        dataset = dataset.batch(10)
    made = lockstep.distribute(model(), 2)
    if how in ("no seed", "behind other steps"):
        expected = pytest.warns(CheckpointWarning, match="is shuffled without a seed")
    else:
        expected = contextlib.nullcontext()
    checkpoint = lockstep.Checkpoint(tmp_path / "run")
    with expected:
        made.fit(dataset, shuffle=False, verbose=0, callbacks=[checkpoint])


def test_nothing_is_said_with_verbose_0(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, Interrupts(0, 1), verbose=0)
    assert "saved" not in capsys.readouterr().out


def test_a_line_for_each_save_on_request(tmp_path, capsys):
    made = lockstep.distribute(model(), 2)
    for folder, verbose in (("quiet", 0), ("told", 1)):
        checkpoint = lockstep.Checkpoint(tmp_path / folder, verbose=verbose)
        made.fit(*data(), 10, epochs=2, verbose=0, callbacks=[checkpoint])
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    told = tmp_path / "told"
    assert lines == [f"lockstep: saving the end of epoch {number} to {told}" for number in (1, 2)]
