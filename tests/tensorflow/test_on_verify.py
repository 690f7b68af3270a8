"""`verify` on TensorFlow passes what is right, and names what is wrong."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import lockstep
from lockstep.engines import current_engine
from tests.precision import floats
from tests.sampling import rest
from tests.tensorflow.test_on_metrics_property import compile_gan, gan, images


def data(rows=40):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 1)).astype(
        "float32"
    )


def with_layer(*between, optimizer="sgd"):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="gelu", name="first")])
    for layer in between:
        made.add(layer)
    made.add(layers.Dense(1, name="last"))
    made.compile(optimizer, "mse", metrics=["mae"])
    return made


def values(made):
    every = [*made.variables, *made.optimizer.variables]
    return [keras.ops.convert_to_numpy(variable) for variable in every]


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, activation="gelu")
        self.drop = layers.Dropout(0.3)
        self.last = layers.Dense(1)

    def call(self, x, training=False):
        return self.last(self.drop(self.hidden(x), training=training))


def subclassed():
    keras.utils.set_random_seed(0)
    made = Subclassed()
    made.compile("sgd", "mse")
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda: with_layer(layers.BatchNormalization(), layers.Dropout(0.2), optimizer="adam"),
        subclassed,
    ],
)
def test_a_right_model_is_equal_in_everything(make):
    found = lockstep.verify(make(), data(), devices=3, steps=5, batch_size=9)
    assert found.equal, found.cause
    assert found.devices == ("cpu:0", "cpu:1", "cpu:2")
    assert not any("whole batch" in note or "batch alone" in note for note in found.notes)
    names = {difference.name.split("/")[-1] for difference in found.differences}
    assert {"loss", "learning_rate", "seed_generator_state", "kernel"} <= names


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
    held = type(made.variables[0].value).__name__
    assert held == ("MirroredVariable" if devices else "ResourceVariable")


class DeviceReader(layers.Layer):
    """Multiplies with how many devices the model was on when it was traced."""

    model = None

    def call(self, x):
        attached = self.model is not None and any("lockstep" in name for name in vars(self.model))
        return x * (1.5 if attached else 1.0)


@pytest.mark.whole
def test_a_layer_that_reads_the_devices_is_named(monkeypatch):
    made = with_layer(DeviceReader(name="culprit"))
    monkeypatch.setattr(DeviceReader, "model", made)
    found = lockstep.verify(made, data(), devices=3, steps=3)
    assert not found.equal
    assert found.first_step == 1
    assert found.first_layer.endswith("culprit")
    assert "something else on several devices" in found.cause


@pytest.mark.whole
def test_what_float64_shows_to_be_rounding_is_said_to_be_rounding():
    """Batch norm takes the mean away again; Adam makes steps of what rounding leaves of a bias."""
    zero = layers.Dense(8, name="zero")
    made = with_layer(zero, layers.BatchNormalization(), optimizer="adam")
    found = lockstep.verify(made, data(), devices=3, batch_size=10)
    assert found.equal, found.cause
    beyond = {d.name: d.largest for d in found.differences if d.first_step is not None}
    assert any(name.endswith("zero/bias") for name in beyond)
    assert found.rounding == max(beyond.values()) > 1e-5


@pytest.mark.whole
def test_a_model_that_no_other_process_can_have():
    """A lookup table is no attribute that can be pickled."""
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)
    held = layers.Lambda(lambda x: x + 0.0 * tf.cast(table.size(), x.dtype))
    zero = layers.Dense(8, name="zero")
    made = with_layer(zero, layers.BatchNormalization(), held, optimizer="adam")
    found = lockstep.verify(made, data(), devices=3, batch_size=10)
    assert (found.verdict, found.first_step, found.rounding) == ("cannot tell", None, None)
    assert "for float64 it cannot be sent to another process (" in found.cause


class PythonCounter(layers.Layer):
    """Counts its traces in Python."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.count = 0

    def call(self, x):
        self.count += 1
        return x * (1 + 0.1 * self.count)


@pytest.mark.whole
def test_a_layer_with_state_in_python_is_named():
    found = lockstep.verify(with_layer(PythonCounter(name="culprit")), data(), devices=2, steps=3)
    assert not found.equal
    assert found.first_layer.endswith("culprit")
    assert "not deterministic" in found.cause


def test_a_layer_that_is_not_split_is_a_note():
    made = with_layer(layers.Lambda(lambda t: t - ops.mean(t, axis=0), name="across"))
    found = lockstep.verify(made, data(), devices=3, steps=2)
    assert found.equal, found.cause
    assert any("every device runs 'across' (Mean)" in note for note in found.notes)


class AsFitHandsThem(keras.Model):
    """A step of its own, that refuses batches in another structure than `fit` has them."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6)

    def call(self, x):
        return self.dense(x)

    def train_step(self, x):
        assert isinstance(x, tf.Tensor), type(x)
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x) - x) ** 2)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


@pytest.mark.whole
@pytest.mark.parametrize("devices", [None, 2])
def test_batches_reach_a_training_step_as_fit_hands_them_over(devices):
    """It got (x, None, None), of a data set that yields x; and the model is not built yet."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    made = AsFitHandsThem()
    made.compile("sgd")
    if devices:
        lockstep.distribute(made, devices)
    source = tf.data.Dataset.from_tensor_slices(data()[0]).batch(7)
    found = lockstep.verify(made, source, devices=3, steps=3)
    assert found.equal, found.cause
    keras.utils.set_random_seed(3)
    fitted = AsFitHandsThem()
    fitted.compile(keras.optimizers.SGD(0.0))
    fitted.fit(data()[0], verbose=0)  # which builds it
    for mine, theirs in zip(made.get_weights(), fitted.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.whole
def test_a_gan_without_a_call_and_with_two_optimizers():
    """`verify` called the model, which has no `call`, and left the slots of its optimizers."""
    made = gan()
    compile_gan(made)
    found = lockstep.verify(made, images(), devices=3, steps=4)
    assert found.equal, found.cause
    names = {difference.name.split("/")[0] for difference in found.differences}
    assert {"d_loss", "g_loss", "d_optimizer", "g_optimizer"} <= names
    assert int(made.d_optimizer.iterations) == 0


@pytest.mark.whole
def test_a_loss_that_is_not_finite_is_not_called_equal():
    x, y = data(70)
    x[33] = np.nan
    found = lockstep.verify(with_layer(), (x, y), devices=3, steps=3)
    assert (found.verdict, found.not_finite_from, found.steps) == ("cannot tell", 2, 1)


SCRIPT = """
import keras, numpy as np
from keras import layers

def build():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model, (np.ones((20, 2), "float32"), np.ones((20, 1), "float32"))
"""


def test_the_command(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "lockstep", "verify", "train.py:build"]
    done = subprocess.run(
        [*command, "--devices", "3", "--rehearse", "--steps", "2", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"equal": true' in done.stdout


@pytest.mark.parametrize("casts", [False, *rest(True)])
def test_casts_to_a_shorter_float_are_found(casts):
    """They bound what a comparison in float64 can say."""
    with floats("float64"):
        cast = layers.Lambda(lambda x: tf.cast(tf.cast(x, tf.float32), x.dtype))
        made = with_layer(layers.BatchNormalization(), *[cast] * casts, optimizer="adam")
        x, y = data(10)
        batch = (x.astype("float64"), y.astype("float64"))
        made.fit(*batch, verbose=0)
        assert current_engine().probe(made).build(batch) == ("float32" if casts else None)
