"""`verify` on TensorFlow, beyond what each backend has: a table, a GAN, and casts."""

import keras
import pytest
import tensorflow as tf
from keras import layers

import lockstep
from tests.every_backend.test_verify import data, with_layer
from tests.tensorflow.test_on_metrics_property import compile_gan, gan, images


@pytest.fixture(autouse=True)
def _same_names():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


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
