"""`verify` on each backend passes what is right, and names what is wrong."""

import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers, ops
from rich.console import Console

import lockstep
from lockstep.attach.attachment import session_of
from lockstep.engines import current_engine
from tests.agreement import values
from tests.precision import floats
from tests.tiers import further, rest

BACKEND = keras.backend.backend()

pytestmark = pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")


@pytest.fixture(autouse=True)
def _same_names():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


def data(rows=40):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 1)).astype(
        "float32"
    )


def compiled(made, optimizer="sgd"):
    made.compile(optimizer, "mse", metrics=["mae"])
    return made


def with_layer(*between, optimizer="sgd"):
    first = layers.Dense(8, activation="gelu", name="first")
    every = [keras.Input((6,)), first, *between, layers.Dense(1, name="last")]
    return compiled(keras.Sequential(every), optimizer)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, activation="gelu")
        self.norm = layers.BatchNormalization()
        self.drop = layers.Dropout(0.3)
        self.last = layers.Dense(1)

    def call(self, x, training=False):
        return self.last(self.drop(self.norm(self.hidden(x), training=training), training=training))


def in_sequence():
    noise = layers.GaussianNoise(0.1, seed=3)
    return with_layer(layers.BatchNormalization(), layers.Dropout(0.2), noise)


@pytest.mark.parametrize("make", [in_sequence, *further(lambda: compiled(Subclassed()))])
def test_a_right_model_is_equal_in_everything(make):
    """With dropout: for the comparison every device draws the numbers of the whole batch."""
    found = lockstep.verify(make(), data(), devices=3, steps=5, batch_size=9)
    assert found.equal, found.cause
    assert found.devices == ("cpu:0", "cpu:1", "cpu:2")
    assert (found.steps, found.rows, found.notes) == (5, (4, 9), ())
    assert all(each.largest <= 1e-5 for each in found.differences)
    names = {each.name.split("/")[-1] for each in found.differences}
    expected = {"loss", "mae", "kernel", "moving_mean", "learning_rate", "seed_generator_state"}
    assert expected <= names


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [3, *rest(None)])
def test_the_model_is_untouched(devices):
    made = with_layer(layers.BatchNormalization(), layers.Dropout(0.2), optimizer="adam")
    if devices:
        lockstep.distribute(made, devices)
    made.fit(*data(), verbose=0)
    before = values(made)
    lockstep.verify(made, data(), devices=2, steps=2)
    for mine, theirs in zip(values(made), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    session = session_of(made)
    assert (1 if session is None else len(session.devices)) == (devices or 1)


class PythonCounter(layers.Layer):
    """Counts its calls, or how often it is traced, in Python."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.count = 0

    def call(self, x):
        self.count += 1
        return x * (1 + 0.1 * self.count)


@pytest.mark.whole
def test_a_layer_with_state_in_python_is_named():
    found = lockstep.verify(with_layer(PythonCounter(name="culprit")), data(), devices=3, steps=3)
    assert not found.equal
    assert found.first_step == 1
    assert found.first_layer.endswith("culprit")
    assert "not deterministic" in found.cause


class ReadsTheDevices(layers.Layer):
    """Multiplies with another number where it runs on several devices."""

    model, factor = None, 1.5

    def call(self, x):
        attached = self.model is not None and any("lockstep" in name for name in vars(self.model))
        return x * (self.factor if attached else 1.0)


@pytest.mark.thorough
@pytest.mark.parametrize("factor", [1.001, *rest(1.5)])
def test_a_layer_that_reads_the_devices_is_named(monkeypatch, factor):
    """What the class holds goes to the process that compares in float64, too."""
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")  # the check of the first step finds it too
    monkeypatch.setattr(ReadsTheDevices, "factor", factor)
    made = with_layer(ReadsTheDevices(name="culprit"))
    monkeypatch.setattr(ReadsTheDevices, "model", made)
    found = lockstep.verify(made, data(), devices=3, steps=3)
    assert not found.equal
    assert found.first_step == 1
    assert found.first_layer.endswith("culprit")
    assert "a different result on several devices" in found.cause


@pytest.mark.thorough
def test_a_layer_that_is_not_split_is_a_note():
    """On JAX the compiler splits it."""
    made = with_layer(layers.Lambda(lambda t: t - ops.mean(t, axis=0), name="across"))
    found = lockstep.verify(made, data(), devices=3, steps=2)
    assert found.equal, found.cause
    noted = [note for note in found.notes if "every device runs 'across' (Mean)" in note]
    assert len(noted) == (BACKEND != "jax")


class AsFitHandsThem(keras.Model):
    """Is not built, and takes batches in the structure of `fit` alone."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6)

    def call(self, x):
        return self.dense(x)

    def train_step(self, *state_and_batch):
        *state, x = state_and_batch
        assert ops.is_tensor(x), type(x)
        return super().train_step(*state, x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((y_pred - x) ** 2)


def bare_tf_data():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(data()[0]).batch(7)


@pytest.mark.parametrize("source", [lambda: data()[0], *rest(bare_tf_data)])
@pytest.mark.parametrize("devices", [None, *rest(2)])
def test_batches_reach_a_training_step_as_fit_hands_them_over(devices, source):
    """It got (x, None, None), of a data set that yields x; and the model is not built yet."""
    made = AsFitHandsThem()
    made.compile("sgd")
    if devices:
        lockstep.distribute(made, devices)
    found = lockstep.verify(made, source(), devices=3, steps=3, batch_size=None)
    assert found.equal, found.cause
    assert "loss" in {each.name for each in found.differences}
    keras.utils.set_random_seed(0)
    fitted = AsFitHandsThem()
    fitted.compile(keras.optimizers.SGD(0.0))
    fitted.fit(source(), shuffle=False, verbose=0)  # which builds it
    for mine, theirs in zip(made.get_weights(), fitted.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("row", "step"), [(33, 2), *rest((3, 1))])
def test_a_loss_that_is_not_finite_is_not_called_equal(row, step, capsys):
    """NaN equals NaN, and the verdict was "4 devices give what one device gives"."""
    x, y = data(70)
    x[row] = np.nan
    found = lockstep.verify(with_layer(), (x, y), devices=3, steps=3)
    assert (found.verdict, found.equal) == ("cannot tell", False)
    assert (found.not_finite_from, found.first_step, found.steps) == (step, None, step - 1)
    assert found.cause.startswith(
        f"On one device the loss or a weight is not finite from step {step} on."
    )
    assert bool(found.differences) == (step == 2)  # those of the step before
    found.show(Console())
    said = " ".join(capsys.readouterr().out.split())
    assert "The comparison cannot tell whether the results are the same." in said
    assert f"not finite from step {step} on" in said
    assert "give the same results as one device" not in said


SCRIPT = """
import keras, numpy as np
from keras import layers

def build():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model, (np.ones((20, 2), "float32"), np.ones((20, 1), "float32"))
"""


@pytest.mark.thorough
def test_the_command(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "lockstep", "verify", "train.py:build"]
    command += ["--devices", "3", "--rehearse", "--steps", "2", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"equal": true' in done.stdout


def _short(x):
    if BACKEND == "torch":
        return x.float().to(x.dtype)
    import tensorflow as tf

    return tf.cast(tf.cast(x, tf.float32), x.dtype)


@pytest.mark.skipif(BACKEND == "jax", reason="this process of JAX has no float64")
@pytest.mark.parametrize(
    "casts", [*(further(False) if BACKEND == "tensorflow" else [False]), *rest(True)]
)
def test_casts_to_a_shorter_float_are_found(casts):
    """They bound what a comparison in float64 can say."""
    with floats("float64"):
        cast = layers.Lambda(_short)
        made = with_layer(layers.BatchNormalization(), *[cast] * casts, optimizer="adam")
        x, y = data(10)
        batch = (x.astype("float64"), y.astype("float64"))
        made.fit(*batch, verbose=0)
        assert current_engine().probe(made).build(batch) == ("float32" if casts else None)
