"""Copies on each device, steps in TensorFlow's form, its strategies, and XLA."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import lockstep
from lockstep.errors import (
    LayoutConflict,
)
from tests.agreement import values
from tests.conformance.common import assert_same
from tests.every_backend.test_in_place import fit, model


def test_every_device_has_the_same_copy_and_assignment_reaches_all():
    made = lockstep.distribute(model(), 3)
    fit(made)
    made.layers[0].kernel.assign(np.full((4, 6), 0.25, "float32"))
    made.optimizer.learning_rate = 0.125
    made.set_weights([2 * w for w in made.get_weights()])
    for variable in [*made.variables, *made.optimizer.variables]:
        first, *others = [copy.numpy() for copy in variable.value.values]
        for other in others:
            np.testing.assert_array_equal(first, other)
    assert float(made.optimizer.learning_rate.numpy()) == 0.125
    assert [copy.device[-5:] for copy in made.variables[0].value.values] == [
        "CPU:0",
        "CPU:1",
        "CPU:2",
    ]


class CustomStep(keras.Model):
    """A model with a training step in TensorFlow's form."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.whole
def test_a_train_step_of_its_own_is_exact():
    def make():
        keras.utils.set_random_seed(1)
        made = CustomStep()
        made.compile(keras.optimizers.Adam(0.01))
        made(np.zeros((1, 4), "float32"))
        return made

    alone, made = make(), lockstep.distribute(make(), 3)
    assert_same(fit(made), fit(alone))
    assert_same(values(made), values(alone))
    for variable in made.variables:
        assert_same(*[[copy.numpy()] for copy in variable.value.values[:2]])


def test_a_model_of_a_strategy_is_refused():
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        made = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    with pytest.raises(LayoutConflict, match="in the scope of a tf"):
        lockstep.distribute(made, 2)


@pytest.mark.whole
@pytest.mark.parametrize("devices", [1, 3])
def test_xla_serves_one_device_and_is_said_to_be_left_out_on_several(capsys, devices):
    alone, made = model(), lockstep.distribute(model(), devices)
    made.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"], jit_compile=True)
    assert_same(fit(made, verbose=2), fit(alone))
    said = capsys.readouterr().out.splitlines()[0]
    rows, without = ("3", ", without XLA") if devices == 3 else ("7", "")
    assert f"{rows} per replica, compiling the training step{without}, " in said
