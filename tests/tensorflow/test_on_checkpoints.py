"""`lockstep.Checkpoint` on TensorFlow: a step may change what no checkpoint saves."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import lockstep
from lockstep.attach.attachment import attachment_of
from lockstep.errors import UnsupportedModel
from tests.checkpoints.data import arrays
from tests.checkpoints.runs import Cut, CutAfter, variables
from tests.conformance import common
from tests.replicas.checkpoints import *  # noqa: F403
from tests.replicas.checkpoints import CUT, CustomStep, ragged, without_dropout


@pytest.mark.parametrize("made_in_it", [keras.optimizers.Adam, lambda: tf.Variable(0.0)])
def test_what_a_step_may_change_and_no_checkpoint_saves_is_refused(made_in_it, tmp_path):
    """A run that goes on would have lost the slots of a GAN's optimizer, or a counter."""
    made = CustomStep([keras.Input((4,)), layers.Dense(2)], name="gan")
    made.compile("sgd", "mse")
    made.other = made_in_it()
    lockstep.distribute(made, 2)
    with pytest.raises(UnsupportedModel, match="may change other of 'gan', but"):
        made.fit(**arrays(), verbose=0, callbacks=[lockstep.Checkpoint(tmp_path)])


@pytest.mark.whole
@pytest.mark.parametrize("devices", [1, 3])
def test_a_snapshot_keeps_the_rows_of_an_embedding(devices):
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
    taken = session.snapshot({"loss": tf.constant(2.0)}, writes=True)
    for _ in range(3):
        made.train_on_batch(x, y)
    values = dict(zip([name for name, *_ in taken.arrays], taken.values, strict=True))
    assert values["logs/loss"] == 2.0
    weights = [value for name, value in values.items() if not name.startswith(("logs", "metrics"))]
    assert len(weights) == taken.variables - 2  # the loss has a sum and a count
    common.assert_same(weights, before, atol=0)
    assert np.abs(np.array(made.weights[0].value) - before[0]).max() > 0


@pytest.mark.whole
def test_an_interrupt_does_not_finish_the_averages_of_the_optimizer():
    """Keras does so on JAX alone."""

    def interrupted(made):
        made.compile(keras.optimizers.SGD(0.05, use_ema=True), "mse")
        with pytest.raises(Cut):
            made.fit(**ragged(), epochs=2, verbose=0, callbacks=[CutAfter(CUT)])
        return made.get_weights()

    one = interrupted(without_dropout())
    common.assert_same(interrupted(lockstep.distribute(without_dropout(), 2)), one)
