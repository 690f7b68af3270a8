"""Data that `tf.distribute` has split, as a script for MirroredStrategy has them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from lockstep.errors import UnusableData

X = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")


def plain():
    return tf.data.Dataset.from_tensor_slices((X, X[:, :2])).batch(6)


def distributed(devices):
    return tf.distribute.MirroredStrategy(devices).experimental_distribute_dataset(plain())


def from_function(devices):
    strategy = tf.distribute.MirroredStrategy(devices)
    return strategy.distribute_datasets_from_function(lambda context: plain())


CALLS = {
    "fit": lambda model, data: model.fit(data, shuffle=False, steps_per_epoch=2, verbose=0),
    "validation": lambda model, data: model.fit(
        plain(), shuffle=False, validation_data=data, verbose=0
    ),
    "evaluate": lambda model, data: model.evaluate(data, verbose=0),
    "predict": lambda model, data: model.predict(data, verbose=0),
    "predict of an iterator": lambda model, data: model.predict(iter(data), steps=1, verbose=0),
    "predict into a file": lambda model, data: lockstep.predict(model, data, "rows.npy"),
}


@pytest.mark.parametrize("made", [distributed, from_function])
@pytest.mark.parametrize("call", CALLS)
def test_data_that_a_strategy_has_split_are_refused_with_what_to_hand_over(call, made):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    lockstep.distribute(model, 2)
    with pytest.raises(UnusableData) as raised:
        CALLS[call](model, made(["cpu:0", "cpu:1"]))
    assert "of tf.distribute, whose batches are already split" in str(raised.value)
    assert "Pass the original tf.data.Dataset" in str(raised.value)
    history = model.fit(plain(), shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"]).all()
