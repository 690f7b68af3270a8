"""Whoever updates variables outside of a step updates every copy, as on one device."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops, optimizers

import lockstep
from tests.conformance.common import assert_same
from tests.precision import floats
from tests.tiers import rest

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
    with floats("float64"):
        model, one = lockstep.distribute(_made(), 3), _made()
        use(model)
        use(one)
    for variable in (*model.variables, *model.optimizer.variables):
        first, *others = [copy.numpy() for copy in variable.value.values]
        for other in others:
            assert_same(other, first, atol=1e-10)
    assert_same(_numbers(model), _numbers(one), atol=1e-10)


OF_THE_OBJECT = """
    __abstractmethods__ __class__ __composite_gradient__ __delattr__ __dict__ __dir__ __doc__
    __getattribute__ __getstate__ __init__ __init_subclass__ __module__ __new__ __repr__
    __setattr__ __sizeof__ __str__ __subclasshook__ __tf_tracing_type__ __weakref__
"""
"""Names that say what an object is, and not what its value is."""


def _outcome(function):
    try:
        found = function()
    except Exception as error:
        return type(error).__name__
    if isinstance(found, tuple):  # `__reduce__`
        found = found[0]()
    if hasattr(found, "__next__"):
        found = list(found)
    return found if found is NotImplemented else np.asarray(found).tolist()


@pytest.mark.parametrize("value", [3.7, 3, True, [[1.0, 2.5], [-3.0, 4.0]]])
def test_every_special_method_of_a_variable_is_that_of_one_device(value):
    """What `float(model.optimizer.learning_rate)` calls in a callback, and all its like."""
    model = lockstep.distribute(_made(), 2)
    plain = tf.Variable(value)
    model.extra = keras.Variable(value, dtype=plain.dtype.name, trainable=False)
    _fit(model)
    mirrored = model.extra.value
    assert len(mirrored.values) == 2
    names = [name for name in dir(type(plain)) if name.startswith("__") and name.endswith("__")]
    asked = [name for name in names if name not in OF_THE_OBJECT.split()]
    assert len(asked) > 50
    for name in asked:
        for given in ((), (2,)):  # an operator of one operand has a name as its second argument
            of_plain, of_mirrored = (
                _outcome(lambda v=v, name=name, given=given: getattr(type(v), name)(v, *given))
                for v in (plain, mirrored)
            )
            np.testing.assert_equal(of_mirrored, of_plain, err_msg=name)
            if of_plain != "TypeError":
                break
    for protocol in (np.asarray, np.array, np.mean, np.float64, copy.copy, copy.deepcopy):
        found = [_outcome(lambda v=v, f=protocol: f(v)) for v in (mirrored, plain)]
        np.testing.assert_equal(*found, err_msg=protocol.__name__)
