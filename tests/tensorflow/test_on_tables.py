"""What is looked up in a table of weights has a gradient for each time, as on one device.

Optimizers square and clip these gradients one by one, before they are added up.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops, optimizers

import lockstep
from lockstep.errors import UnsplitBatchWarning
from tests.conformance.common import assert_same
from tests.tiers import rest

pytestmark = pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")


class _Centered(layers.Layer):
    """What it looks up, less the mean of the batch, so that every device runs the whole batch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = layers.Embedding(9, 4)

    def build(self, shape):
        self.table.build(shape)

    def call(self, x):
        found = ops.mean(self.table(x), axis=1)
        return found - ops.mean(found, axis=0, keepdims=True)


class _WithALoss(_Centered):
    """Adds a loss of the batch, and gives a number of it."""

    def call(self, x):
        found = ops.mean(self.table(x), axis=1)
        self.add_loss(ops.mean(ops.std(found, axis=0)))
        return found * ops.mean(found)


class _LooksUpInTheLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        plain = super().compute_loss(x, y, y_pred, sample_weight)
        return plain + 99 * ops.mean(ops.square(self.get_layer("layer").table(x)))


class _ByRows(_Centered):
    def call(self, x):
        return ops.mean(self.table(x), axis=1)


class _Positions(layers.Layer):
    """Adds an embedding of the positions, which are the same for every row."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table, self.positions = layers.Embedding(9, 4), layers.Embedding(8, 4)

    def build(self, shape):
        self.table.build(shape)
        self.positions.build(shape)

    def call(self, x):
        found = self.table(x) + self.positions(ops.arange(ops.shape(x)[1]))
        return ops.mean(found * found, axis=1)


class _PositionsInTheSameTable(_Centered):
    """Looks up words and positions in one table, and one position several times."""

    def call(self, x):
        found = self.table(x) + self.table(ops.flip(x, axis=1)) * 2
        found += self.table(ops.arange(ops.shape(x)[1])) + self.table(np.array([0, 1, 1, 2, 0]))
        return ops.mean(found * found, axis=1)


class _PositionsOfEachRow(_Centered):
    """Looks up the positions once for each row, so that each row has entries of its own."""

    def call(self, x):
        positions = ops.broadcast_to(ops.arange(ops.shape(x)[1]), ops.shape(x))
        found = self.table(x) + self.table(positions)
        return ops.mean(found * found, axis=1)


@lockstep.rowwise
class _InABranch(_Centered):
    """Looks positions up in a branch of TensorFlow."""

    def call(self, x):
        steps = tf.shape(x)[1]
        more = tf.cond(steps > 2, lambda: self.table(tf.range(steps)), lambda: tf.zeros((5, 4)))
        return ops.mean(ops.square(self.table(x) + more), axis=1)


def _trained(distribute, layer, kind, optimizer, steps=5):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(2)
    inputs = keras.Input((steps,), dtype="int32")
    model = kind(inputs, layers.Dense(2)(layer(name="layer")(inputs)), name="made")
    model.compile(optimizer(), "mse")
    distribute(model)
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 6, size=(18, 5)), rng.normal(size=(18, 2)).astype("float32")
    history = model.fit(x, y, batch_size=7, epochs=2, verbose=0, shuffle=False).history
    return [*history.values(), *model.get_weights(), *map(np.asarray, model.optimizer.variables)]


@pytest.mark.parametrize(
    ("layer", "kind", "optimizer"),
    [
        (_Centered, keras.Model, lambda: optimizers.Adam(0.01)),
        *rest(
            (_Centered, keras.Model, lambda: optimizers.SGD(0.1, clipnorm=0.1)),
            (_WithALoss, keras.Model, lambda: optimizers.Adagrad(0.1)),
            (_ByRows, _LooksUpInTheLoss, lambda: optimizers.Adagrad(0.1)),
        ),
    ],
)
def test_each_look_into_a_table_has_a_gradient_of_its_own(layer, kind, optimizer):
    many = _trained(lambda made: lockstep.distribute(made, 3), layer, kind, optimizer)
    assert_same(many, _trained(lambda made: None, layer, kind, optimizer))


class _OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "kind", "optimizer", "steps"),
    [
        (_Positions, keras.Model, lambda: optimizers.Adam(0.01), None),
        (_PositionsInTheSameTable, _OwnStep, lambda: optimizers.SGD(0.1, clipnorm=0.1), 5),
        (_PositionsOfEachRow, keras.Model, lambda: optimizers.Adagrad(0.1), None),
        *rest(
            (_Positions, _OwnStep, lambda: optimizers.RMSprop(0.01), 5),
            (_PositionsInTheSameTable, keras.Model, lambda: optimizers.Adam(0.01), None),
        ),
    ],
)
@pytest.mark.filterwarnings("error::lockstep.errors.UnsplitBatchWarning")
def test_what_every_device_looks_up_has_one_gradient(layer, kind, optimizer, steps):
    many = _trained(lambda made: lockstep.distribute(made, 3), layer, kind, optimizer, steps)
    assert_same(many, _trained(lambda made: None, layer, kind, optimizer, steps))


def test_a_look_up_in_a_branch_runs_on_the_first_device_and_says_so():
    """TensorFlow gives the gradient of a branch as one piece."""
    made = (_InABranch, keras.Model, lambda: optimizers.Adam(0.01))
    with pytest.warns(
        UnsplitBatchWarning, match="looks up rows of a weight inside a TensorFlow function"
    ):
        many = _trained(lambda made: lockstep.distribute(made, 3), *made)
    assert_same(many, _trained(lambda made: None, *made))
