"""The interface of an engine is what the core needs: an engine of a hundred lines trains."""

import sys

import keras
import numpy as np
import pytest

import lockstep
from lockstep.errors import DeviceError, UnsupportedModel
from tests.conformance.common import assert_same, weights
from tests.conformance.numpy_engine import NumPyEngine, NumPySession
from tests.conformance.side_by_side import held_out, train
from tests.conformance.test_loop import Notes, run_all


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch):
    # `lockstep.distribute` is the function; its module has the same name.
    monkeypatch.setattr(sys.modules["lockstep.distribute"], "current_engine", NumPyEngine)


def line():
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    made.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return made


def test_calls_logs_and_weights_are_those_of_keras():
    found = []
    for made in (line(), lockstep.distribute(line())):
        notes = Notes()
        run_all(made, [notes], steps_per_epoch=3)
        calls = [(name, number, list(logs or {})) for _, name, number, logs in notes.calls]
        logs = [dict(logs or {}) for _, _, _, logs in notes.calls]
        predicted = made.predict(held_out()[0], verbose=0)
        found.append((calls, logs, weights(made), predicted, made.history.history))
    keras_alone, numpy = found
    assert numpy[0] == keras_alone[0]
    for mine, theirs in zip(numpy[1:], keras_alone[1:], strict=True):
        assert_same(mine, theirs)


def test_a_model_is_on_one_device_again_after_release():
    made, plain = lockstep.distribute(line()), line()
    assert isinstance(vars(made)["_lockstep"].session, NumPySession)
    attributes = set(vars(made)) - set(vars(plain))
    lockstep.release(made)
    assert not attributes & set(vars(made))
    assert_same(train(made), train(plain))


def test_what_the_engine_does_not_know_is_refused_before_anything_changes():
    deep = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    before = set(vars(deep))
    with pytest.raises(UnsupportedModel, match="not one dense layer"):
        lockstep.distribute(deep)
    assert set(vars(deep)) == before
    with pytest.raises(DeviceError, match="devices=2"):
        lockstep.distribute(line(), devices=2)


def test_a_checkpoint_goes_on_within_an_epoch(tmp_path):
    whole = line()
    train(whole, epochs=2)

    class Stop(keras.callbacks.Callback):
        after = None

        def get_state(self):
            return {}

        def set_state(self, state):
            pass

        def on_train_batch_end(self, batch, logs=None):
            if batch == self.after:
                raise KeyboardInterrupt

    def goes_on(after):
        made, stop = lockstep.distribute(line()), Stop()
        stop.after = after
        train(made, [lockstep.Checkpoint(tmp_path, steps=2), stop], epochs=2)
        return made

    with pytest.raises(KeyboardInterrupt):
        goes_on(4)
    again = goes_on(None)
    assert_same(weights(again), weights(whole))
    assert int(np.asarray(again.optimizer.iterations)) == 14
