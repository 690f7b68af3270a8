"""What is looked up in a table of weights has a gradient for each time, as on one device.

Optimizers square and clip these gradients one by one, before they are added up.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops, optimizers

import lockstep
from tests.conformance.common import assert_same
from tests.sampling import rest

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


def _trained(distribute, layer, kind, optimizer):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(2)
    inputs = keras.Input((5,), dtype="int32")
    model = kind(inputs, layers.Dense(2)(layer(name="layer")(inputs)), name="made")
    model.compile(optimizer(), "mse")
    distribute(model)
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 6, size=(14, 5)), rng.normal(size=(14, 2)).astype("float32")
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
