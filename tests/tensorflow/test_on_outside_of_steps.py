"""Whoever updates variables outside of a step updates every copy, as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops, optimizers

import lockstep
from tests.conformance.common import assert_same
from tests.sampling import rest

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(14, 5)).astype("float32"), RNG.normal(size=(14, 2)).astype("float32")


def _fit(model):
    model.fit(X, Y, batch_size=7, epochs=2, verbose=0, shuffle=False)


def _step(model, optimizer):
    with tf.GradientTape() as tape:
        loss = ops.mean(ops.square(model(X, training=True) - Y))
    weights = model.trainable_weights
    optimizer.apply(tape.gradient(loss, weights), weights)


def _own_loop(model):
    _step(model, model.optimizer)
    _fit(model)
    _step(model, model.optimizer)


def _own_loop_in_a_graph(model):
    _fit(model)
    step = tf.function(_step, autograph=False)
    step(model, model.optimizer)
    _fit(model)


def _another_optimizer(model):
    _fit(model)
    _step(model, optimizers.SGD(0.1, momentum=0.9))


def _swapped(model):
    swaps = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
    model.fit(X, Y, batch_size=7, epochs=2, verbose=0, shuffle=False, callbacks=swaps)


def _made():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4, use_bias=False)])
    model.add(layers.BatchNormalization())
    model.add(layers.Dense(2))
    averaged = optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_overwrite_frequency=3)
    model.compile(averaged, "mse")
    return model


def _numbers(model):
    return [np.asarray(each) for each in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize(
    "use", [_fit, _own_loop, *rest(_own_loop_in_a_graph, _another_optimizer, _swapped)]
)
def test_every_copy_is_updated(use):
    """With averages of the weights, which an optimizer puts in their place as `fit` ends."""
    model = lockstep.distribute(_made(), 3)
    use(model)
    for variable in (*model.variables, *model.optimizer.variables):
        first, *others = [copy.numpy() for copy in variable.value.values]
        for other in others:
            np.testing.assert_array_equal(first, other)
    one = _made()
    use(one)
    assert_same(_numbers(model), _numbers(one))
