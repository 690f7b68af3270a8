"""What `lockstep.Checkpoint` has to do on an engine with replicas: killed and resumed runs.

The truth is Keras alone on one device, or a run that was not cut. PyTorch computes in float64.
"""

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
from keras import layers

import lockstep
from lockstep.attach.attachment import attachment_of
from lockstep.checkpoint.export import export_model
from lockstep.errors import CheckpointWarning, UnsplitBatchWarning
from tests.checkpoints.data import SOURCES, arrays
from tests.checkpoints.models import accumulating, everything, recurrent, sequences, with_validation
from tests.checkpoints.runs import EPOCHS, STEPS, assert_same_end, small, train, variables
from tests.conformance.side_by_side import BATCH, held_out, smooth
from tests.tables import Table
from tests.tiers import rest

BOUND = 1e-10 if keras.backend.backend() == "torch" else 1e-5
SAME_BITS = 3 if keras.backend.backend() == "torch" else 2
"""Devices of runs with the same bits. TensorFlow adds three values in the order they come in."""

CUT = STEPS + 3  # within the second epoch
SAVING = {"steps": 1, "background": False}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        for known in (".*drawn again", ".*Kill is in the checkpoint, but not in this fit"):
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
    """One layer draws from its own seed, and one from a state that it shares."""
    made = keras.Sequential([smooth(), layers.Dropout(0.2, seed=4)])
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


@pytest.mark.parametrize(("first", "then"), rest((1, 4), (4, 1)))
def test_a_resumed_run_ends_as_keras_alone_on_one_device(first, then, tmp_path):
    mine = cut_and_gone_on(ragged, tmp_path, first, then, make=without_dropout)
    assert_same_end(mine, stock(ragged, without_dropout), atol=BOUND)


KILLED = """
import os, signal, sys
import keras
import lockstep
if keras.backend.backend() == "torch":
    import tests.torch.double
from tests.checkpoints.runs import train
from tests.replicas.checkpoints import CUT, SAVING, ragged, without_dropout

class Kill(keras.callbacks.Callback):
    left = CUT
    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)

given = {"make": without_dropout, "callbacks": [Kill], "checkpoint": SAVING}
train(ragged, sys.argv[1], devices=2, **given)
"""


@pytest.mark.thorough
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
    truth = train(SOURCES[name], tmp_path / "whole", devices=SAME_BITS, checkpoint={}, **given)
    assert_same_end(
        cut_and_gone_on(SOURCES[name], tmp_path / "run", SAME_BITS, SAME_BITS, **given), truth
    )


@pytest.mark.parametrize("name", rest("arrays", "tf_data", "py_dataset_with_state", "generator"))
def test_every_kind_of_data_goes_on_between_two_epochs(name, tmp_path):
    truth = train(SOURCES[name], tmp_path / "whole", devices=SAME_BITS, checkpoint={})
    train(SOURCES[name], tmp_path / "run", devices=SAME_BITS, epochs=2, checkpoint={})
    assert_same_end(train(SOURCES[name], tmp_path / "run", devices=SAME_BITS, checkpoint={}), truth)


MODELS = Table(
    {
        "everything": (everything, with_validation),
        "accumulating": (accumulating, arrays),
        "recurrent": (recurrent, sequences),
    }
)


@pytest.mark.parametrize("name", rest(*MODELS))
def test_every_variable_goes_on(name, tmp_path):
    plain, source = MODELS[name]
    truth = train(source, tmp_path / "whole", devices=SAME_BITS, make=plain, checkpoint={})
    assert_same_end(
        cut_and_gone_on(source, tmp_path / "run", SAME_BITS, SAME_BITS, make=plain), truth
    )


@pytest.mark.whole
def test_several_steps_in_one_execution(tmp_path):
    def make():
        made = without_dropout()
        made.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"], steps_per_execution=3)
        return made

    train(ragged, tmp_path, cut=4, devices=2, make=make, checkpoint=SAVING)
    mine = train(ragged, tmp_path, devices=3, make=make)
    assert_same_end(mine, stock(ragged, make), atol=BOUND)


class OwnFit(keras.Sequential):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


class CustomStep(keras.Sequential):
    """Trains as Keras does; lockstep cannot know, so only the first device runs every batch."""

    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.whole
@pytest.mark.parametrize("cls", [OwnFit, CustomStep])
def test_a_fit_and_a_step_of_the_class(cls, tmp_path):
    def make():
        made = cls([keras.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(2)])
        made.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
        return made

    mine = cut_and_gone_on(ragged, tmp_path, 3, 2, make=make)
    assert_same_end(mine, stock(ragged, make), atol=BOUND)


@pytest.mark.parametrize("devices", [1, *rest(3)])
def test_a_snapshot_keeps_its_values_while_training_goes_on(devices):
    made = lockstep.distribute(small(), devices)
    x, y = np.ones((6, 4)), np.ones((6, 2))
    made.train_on_batch(x, y)
    before = variables(made)
    session = attachment_of(made).session
    taken = session.snapshot({"loss": keras.ops.convert_to_tensor(2.0)}, writes=True)
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
    lockstep.release(made)


@pytest.mark.thorough
def test_a_released_model_is_that_of_the_run_and_export_gives_a_plain_file(tmp_path):
    keras.utils.set_random_seed(5)
    made = lockstep.distribute(without_dropout(), 3)
    made.fit(**ragged(), epochs=2, verbose=0, callbacks=[lockstep.Checkpoint(tmp_path / "run")])
    lockstep.release(made)
    export_model(tmp_path / "run", tmp_path / "model.keras")
    plain = keras.saving.load_model(tmp_path / "model.keras")
    x, _ = held_out()
    np.testing.assert_array_equal(plain.predict(x, verbose=0), made.predict(x, verbose=0))
    for _ in range(2):  # at once, and after each has trained on
        for mine, theirs in zip(*(variables(each).values() for each in (plain, made)), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        for each in (plain, made):
            each.fit(**ragged(), verbose=0)
