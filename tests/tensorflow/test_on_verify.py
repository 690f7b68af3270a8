"""`verify` on TensorFlow, beyond what each backend has: a table, a GAN, and casts."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import lockstep
from lockstep.engines import current_engine
from tests.precision import floats
from tests.tensorflow.test_on_metrics_property import compile_gan, gan, images
from tests.tiers import rest


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
    assert (
        "for the float64 comparison, the model cannot be sent to another process (" in found.cause
    )


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


@pytest.mark.thorough
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
