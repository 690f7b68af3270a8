"""Models that are made in a `keras.RematScope`."""

import keras
import pytest
from keras import layers

import lockstep
from tests.conformance.common import assert_same, compile_, data, snapshot


def model(mode):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    with keras.RematScope(mode=mode):
        made = keras.Sequential([keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(2)])
    compile_(made)
    return made


@pytest.mark.parametrize("mode", ["full", "larger_than"])
@pytest.mark.parametrize("devices", [1, 3])
def test_training_validation_and_prediction_follow_one_another(mode, devices):
    """`jax.checkpoint` keeps traces by function: a second program got tracers of the first one."""
    alone, made = model(mode), lockstep.distribute(model(mode), devices)
    x, y = data()
    found = []
    for each in (alone, made):
        given = {"batch_size": 7, "verbose": 0}
        history = each.fit(x, y, epochs=2, shuffle=False, validation_data=(x, y), **given).history
        predicted = each.predict(x, **given)
        found.append((history, predicted, each.evaluate(x, y, **given), each.predict(x, **given)))
    assert_same(*found)
    assert_same(snapshot(made), snapshot(alone))
