"""`lockstep.Checkpoint` on PyTorch: killed runs, resumed runs, and what a checkpoint holds."""

import gc
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import torch
from keras import layers

import lockstep
from lockstep.engines.attachment import attachment_of
from lockstep.errors import CheckpointWarning, UnsplitBatchWarning, UnsupportedModel
from tests.checkpoints.data import SOURCES, arrays
from tests.checkpoints.models import accumulating, everything, recurrent, sequences, with_validation
from tests.checkpoints.runs import EPOCHS, STEPS, assert_same_end, small, train, variables
from tests.conformance.side_by_side import BATCH, smooth
from tests.sampling import rest
from tests.torch.double import BOUND

CUT = STEPS + 3  # within the second epoch
SAVING = {"steps": 1, "background": False}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        for known in (".*made once more", ".*Kill is gone"):
            warnings.filterwarnings("ignore", message=known, category=CheckpointWarning)
        warnings.simplefilter("ignore", UnsplitBatchWarning)
        yield
    gc.collect()  # Grain ends its threads with its iterator


def ragged():
    """The last batch has one row: some devices take none."""
    given = {**with_validation(), "shuffle": False}
    return {**given, **{name: given[name][: 6 * BATCH + 1] for name in ("x", "y")}}


def without_dropout():
    return smooth(dropout=0.0)


def with_dropout():
    """One layer draws from its seed, and one from the state of PyTorch."""
    made = smooth()
    made = keras.Sequential([made, layers.Dropout(0.2, seed=4)])
    made.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])
    return made


def stock(source, make):
    """The history and variables that Keras leaves on one device, without lockstep."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    made = make()
    keras.utils.set_random_seed(9)
    history = made.fit(**{"epochs": EPOCHS, "verbose": 0, **source()}).history
    return history, variables(made)


def cut_and_gone_on(source, folder, first, then, **options):
    train(source, folder, cut=CUT, devices=first, checkpoint=SAVING, **options)
    return train(source, folder, devices=then, **options)


KILLED = """
import os, signal, sys
import keras
import lockstep
import tests.torch.double
from tests.checkpoints.runs import train
from tests.torch.test_on_checkpoints import CUT, SAVING, ragged, without_dropout

class Kill(keras.callbacks.Callback):
    left = CUT
    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)

given = {"make": without_dropout, "callbacks": [Kill], "checkpoint": SAVING}
train(ragged, sys.argv[1], devices=2, **given)
"""


def test_a_killed_run_goes_on_on_another_number_of_devices(tmp_path):
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(Path(lockstep.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    newest = max(each.name for each in tmp_path.iterdir() if each.name[:1].isdigit())
    assert newest.endswith("epoch-0001-step-000002")
    mine = train(ragged, tmp_path, devices=3, make=without_dropout)
    assert_same_end(mine, stock(ragged, without_dropout), atol=BOUND)


@pytest.mark.parametrize("name", ["arrays", *rest(*(name for name in SOURCES if name != "arrays"))])
def test_every_kind_of_data_goes_on_where_it_was_bit_for_bit(name, tmp_path):
    """Dropout included: the same number of devices draws the same masks."""
    given = {"make": with_dropout}
    truth = train(SOURCES[name], tmp_path / "whole", devices=3, checkpoint={}, **given)
    assert_same_end(cut_and_gone_on(SOURCES[name], tmp_path / "run", 3, 3, **given), truth)


MODELS = {
    "everything": (everything, with_validation),
    "accumulating": (accumulating, arrays),
    "recurrent": (recurrent, sequences),
}


@pytest.mark.parametrize("name", rest(*MODELS))
def test_every_variable_goes_on(name, tmp_path):
    plain, source = MODELS[name]
    truth = train(source, tmp_path / "whole", devices=3, make=plain, checkpoint={})
    assert_same_end(cut_and_gone_on(source, tmp_path / "run", 3, 3, make=plain), truth)


class OwnFit(keras.Sequential):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


class CustomStep(keras.Sequential):
    """Trains as Keras does; lockstep cannot know, so the first device runs every batch."""

    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize("cls", [OwnFit, *rest(CustomStep)])
def test_a_fit_and_a_step_of_the_class(cls, tmp_path):
    def make():
        made = cls([keras.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(2)])
        made.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
        return made

    mine = cut_and_gone_on(ragged, tmp_path, 3, 3, make=make)
    assert_same_end(mine, stock(ragged, make), atol=BOUND)


class Counted(layers.Layer):
    """Has a buffer of PyTorch, which is no variable of Keras."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def call(self, x):
        return x


@pytest.mark.parametrize("made_in_it", [keras.optimizers.Adam, Counted])
def test_what_a_step_may_change_and_no_checkpoint_saves_is_refused(made_in_it, tmp_path):
    made = CustomStep([keras.Input((4,)), layers.Dense(2)], name="gan")
    made.compile("sgd", "mse")
    made.other = made_in_it()
    lockstep.distribute(made, 2)
    with pytest.raises(UnsupportedModel, match=r"may change other.* of 'gan', and"):
        made.fit(**arrays(), verbose=0, callbacks=[lockstep.Checkpoint(tmp_path)])


def test_a_snapshot_keeps_its_values_while_training_goes_on():
    made = lockstep.distribute(small(), 1)
    x, y = np.ones((6, 4)), np.ones((6, 2))
    made.train_on_batch(x, y)
    before = variables(made)
    session = attachment_of(made).session
    taken = session.fit_state().snapshot({"loss": torch.tensor(2.0)})
    made.train_on_batch(x, y)
    values = dict(zip([name for name, *_ in taken.arrays], taken.values, strict=True))
    assert values["logs/loss"] == 2.0
    for group in ("trainable", "non_trainable", "optimizer"):
        for name in values:
            path = name.removeprefix(f"{group}/")
            if path != name:
                np.testing.assert_array_equal(values[name], before.pop(path))
    assert not before, "every variable is in the snapshot"
    kernel = made.weights[0].path
    assert np.abs(variables(made)[kernel] - values[f"trainable/{kernel}"]).max() > 0
