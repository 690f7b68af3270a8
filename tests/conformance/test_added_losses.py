"""The losses that layers add are counted, in every trace.

The story: one of many runs of `added_losses` gave a validation loss that lacked a
penalty. Keras 3.15.1 finds the losses of a layer by the `id` of arrays of earlier
traces, which are gone, so that another array may have got the same `id`.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep


class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        return x


class IdsOfThisTrace(set):
    pass


class EveryId(set):
    """The ids of an earlier trace, where a loss of this one is sure to meet one of them."""

    def __contains__(self, item):
        return True

    def clear(self):
        self.__class__ = IdsOfThisTrace


def penalised(devices=None):
    model = keras.Sequential([keras.Input((3,)), Penalty(), layers.Dense(1, use_bias=False)])
    if devices is not None:
        lockstep.distribute(model, devices)
    model.compile("sgd", "mse")
    return model


def evaluated_again(model):
    """The loss of a second evaluation, in batches of another size: traced anew."""
    model.evaluate(X, Y, verbose=0)
    vars(model.layers[-1])["_loss_ids"] = EveryId()  # past the tracker of Keras
    return model.evaluate(X, Y, batch_size=3, verbose=0)


def loss_by_hand(model):
    return np.mean((X @ np.asarray(model.layers[-1].kernel) - Y) ** 2) + np.mean(X**2)


X = np.arange(21, dtype="float32").reshape(7, 3) / 10
Y = np.ones((7, 1), "float32")


@pytest.mark.each_value_once
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_loss_is_counted_whatever_ids_an_earlier_trace_left(devices, run_eagerly):
    model = penalised(devices)
    model.run_eagerly = run_eagerly
    np.testing.assert_allclose(evaluated_again(model), loss_by_hand(model), rtol=1e-6)
