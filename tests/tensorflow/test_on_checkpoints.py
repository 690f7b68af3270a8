"""`lockstep.Checkpoint` on TensorFlow: killed runs, resumed runs, and what a checkpoint holds."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import lockstep
from lockstep.engines.attachment import attachment_of
from lockstep.errors import CheckpointWarning, UnsplitBatchWarning, UnsupportedModel
from lockstep.export import export_model
from tests.checkpoints.data import SOURCES, arrays
from tests.checkpoints.models import accumulating, everything, recurrent, sequences, with_validation
from tests.checkpoints.runs import EPOCHS, STEPS, Cut, CutAfter, assert_same_end, train, variables
from tests.conformance import common
from tests.conformance.side_by_side import BATCH, held_out, smooth
from tests.sampling import rest

CUT = STEPS + 3  # within the second epoch


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        for known in (".*made once more", ".*Kill is gone"):
            warnings.filterwarnings("ignore", message=known, category=CheckpointWarning)
        yield


def in_order():
    return {**with_validation(), "shuffle": False}


def ragged():
    """As many steps, the last of them with one row: some devices take none."""
    given = in_order()
    return {**given, **{name: given[name][: 6 * BATCH + 1] for name in ("x", "y")}}


def without_dropout():
    return smooth(dropout=0.0)


def stock(source, make):
    """The history and variables that Keras leaves on one device, without lockstep."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    made = make()
    keras.utils.set_random_seed(9)
    history = made.fit(**{"epochs": EPOCHS, "verbose": 0, **source()}).history
    return history, variables(made)


def cut_and_gone_on(source, folder, first, then, **options):
    saving = {"steps": 1, "background": False}
    train(source, folder, cut=CUT, devices=first, checkpoint=saving, **options)
    return train(source, folder, devices=then, **options)


@pytest.mark.parametrize(("first", "then"), [(2, 3), *rest((1, 4), (4, 1))])
def test_a_resumed_run_ends_as_keras_alone_on_one_device(first, then, tmp_path):
    mine = cut_and_gone_on(ragged, tmp_path, first, then, make=without_dropout)
    assert_same_end(mine, stock(ragged, without_dropout), atol=1e-5)


KILLED = """
import os, signal, sys
import keras
import lockstep
from tests.checkpoints.runs import train
from tests.tensorflow.test_on_checkpoints import CUT, in_order, without_dropout

class Kill(keras.callbacks.Callback):
    left = CUT
    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)

saving = {"steps": 1, "background": False}
train(
    in_order, sys.argv[1], devices=4, make=without_dropout, callbacks=[Kill], checkpoint=saving
)
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
    mine = train(in_order, tmp_path, devices=2, make=without_dropout)
    assert_same_end(mine, stock(in_order, without_dropout), atol=1e-5)


@pytest.mark.whole
@pytest.mark.parametrize(
    "name", ["arrays", "tf_data", *rest(*(SOURCES.keys() - {"arrays", "tf_data"}))]
)
def test_every_kind_of_data_goes_on_where_it_was_bit_for_bit(name, tmp_path):
    truth = train(SOURCES[name], tmp_path / "whole", devices=2, checkpoint={})
    assert_same_end(cut_and_gone_on(SOURCES[name], tmp_path / "run", 2, 2), truth)


@pytest.mark.parametrize("name", rest("arrays", "tf_data", "py_dataset_with_state", "generator"))
def test_every_kind_of_data_goes_on_between_two_epochs(name, tmp_path):
    truth = train(SOURCES[name], tmp_path / "whole", devices=2, checkpoint={})
    train(SOURCES[name], tmp_path / "run", devices=2, epochs=2, checkpoint={})
    assert_same_end(train(SOURCES[name], tmp_path / "run", devices=2, checkpoint={}), truth)


MODELS = {
    "everything": (everything, with_validation),
    "accumulating": (accumulating, arrays),
    "recurrent": (recurrent, sequences),
}


@pytest.mark.parametrize("name", ["recurrent", *rest("everything", "accumulating")])
def test_every_variable_goes_on(name, tmp_path):
    make, source = MODELS[name]
    truth = train(source, tmp_path / "whole", devices=2, make=make, checkpoint={})
    assert_same_end(cut_and_gone_on(source, tmp_path / "run", 2, 2, make=make), truth)


@pytest.mark.whole
def test_several_steps_in_one_execution(tmp_path):
    def make():
        made = without_dropout()
        made.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"], steps_per_execution=3)
        return made

    saving = {"steps": 1, "background": False}
    train(in_order, tmp_path, cut=4, devices=2, make=make, checkpoint=saving)
    assert_same_end(train(in_order, tmp_path, devices=3, make=make), stock(in_order, make), 1e-5)


class OwnFit(keras.Sequential):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


class CustomStep(keras.Sequential):
    """Trains as Keras does; lockstep cannot know, so the first device runs every batch."""

    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.whole
@pytest.mark.parametrize("cls", [OwnFit, *rest(CustomStep)])
def test_a_fit_and_a_step_of_the_class(cls, tmp_path):
    def make():
        made = cls([keras.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(2)])
        made.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsplitBatchWarning)
        mine = cut_and_gone_on(in_order, tmp_path, 2, 3, make=make)
    assert_same_end(mine, stock(in_order, make), atol=1e-5)


@pytest.mark.parametrize("made_in_it", [keras.optimizers.Adam, lambda: tf.Variable(0.0)])
def test_what_a_step_may_change_and_no_checkpoint_saves_is_refused(made_in_it, tmp_path):
    """A run that goes on would have lost the slots of a GAN's optimizer, or a counter."""
    made = CustomStep([keras.Input((4,)), layers.Dense(2)], name="gan")
    made.compile("sgd", "mse")
    made.other = made_in_it()
    lockstep.distribute(made, 2)
    with pytest.raises(UnsupportedModel, match="may change other of 'gan', and"):
        made.fit(**arrays(), verbose=0, callbacks=[lockstep.Checkpoint(tmp_path)])


@pytest.mark.whole
@pytest.mark.parametrize("devices", [1, 3])
def test_a_snapshot_keeps_its_values_while_training_goes_on(devices):
    """With an embedding, whose rows are updated one by one; XLA compiles for one device."""
    keras.utils.set_random_seed(1)
    made = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            layers.Embedding(9, 3),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    made.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=devices == 1)
    lockstep.distribute(made, devices)
    x, y = np.arange(12).reshape(6, 2) % 9, np.ones((6, 2), "float32")
    made.train_on_batch(x, y)
    before = [np.array(value) for value in variables(made).values()]
    session = attachment_of(made).session
    taken = session.fit_state().snapshot({"loss": tf.constant(2.0)})
    for _ in range(3):
        made.train_on_batch(x, y)
    values = dict(zip([name for name, *_ in taken.arrays], taken.values, strict=True))
    assert values["logs/loss"] == 2.0
    weights = [value for name, value in values.items() if not name.startswith(("logs", "metrics"))]
    assert len(weights) == taken.variables - 2  # the loss has a sum and a count
    common.assert_same(weights, before, atol=0)
    assert np.abs(np.array(made.weights[0].value) - before[0]).max() > 0


def test_a_released_model_is_that_of_the_run_and_export_gives_a_plain_file(tmp_path):
    keras.utils.set_random_seed(5)
    made = lockstep.distribute(without_dropout(), 3)
    made.fit(**in_order(), epochs=2, verbose=0, callbacks=[lockstep.Checkpoint(tmp_path / "run")])
    lockstep.release(made)
    assert not any(isinstance(v.value, tf.distribute.DistributedValues) for v in made.variables)
    export_model(tmp_path / "run", tmp_path / "model.keras")
    plain = keras.saving.load_model(tmp_path / "model.keras")
    x, _ = held_out()
    np.testing.assert_array_equal(plain.predict(x, verbose=0), made.predict(x, verbose=0))
    mine, theirs = variables(plain), variables(made)
    common.assert_same([*mine.values()], [*theirs.values()], atol=0)
    plain.fit(**in_order(), verbose=0)
    made.fit(**in_order(), verbose=0)
    common.assert_same(plain.get_weights(), made.get_weights(), atol=0)


@pytest.mark.whole
def test_an_interrupt_does_not_finish_the_averages_of_the_optimizer():
    """Keras does so on JAX alone."""

    def interrupted(made):
        made.compile(keras.optimizers.SGD(0.05, use_ema=True), "mse")
        with pytest.raises(Cut):
            made.fit(**in_order(), epochs=2, verbose=0, callbacks=[CutAfter(CUT)])
        return made.get_weights()

    one = interrupted(without_dropout())
    common.assert_same(interrupted(lockstep.distribute(without_dropout(), 2)), one)
