"""One thread at a time is in the calls of a model: others wait, or are refused during a `fit`."""

import threading

import keras
import pytest

import lockstep
from lockstep.errors import BusyModel
from tests.conformance.common import assert_compile_is_refused_in, assert_same, data
from tests.tensorflow.test_on_in_place import fit, model, values

X, Y = data(14)


def holders(made):
    every = [*made.variables, *made.optimizer.variables]
    return {type(variable.value).__name__ for variable in every}


class Other(keras.callbacks.Callback):
    """Lets another thread begin after the first batch of a call."""

    def __init__(self, call):
        super().__init__()
        self.call, self.found = call, None
        self.thread = threading.Thread(target=self._run, name="other")

    def _run(self):
        try:
            self.found = self.call()
        except BusyModel as error:
            self.found = error

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.thread.start()
            self.thread.join(0.2)  # time to fail in; who waits its turn is waited for later

    on_predict_batch_end = on_train_batch_end

    def result(self):
        self.thread.join(120)
        assert not self.thread.is_alive()
        return self.found


def test_calls_of_another_thread_wait_during_predict_and_are_refused_during_fit():
    made, alone = lockstep.distribute(model(), 3), model()
    right = alone.predict(X, verbose=0)
    other = Other(lambda: made.predict(X, verbose=0))
    assert_same(made.predict(X, batch_size=7, verbose=0, callbacks=[other]), right)
    assert_same(other.result(), right)
    other = Other(lambda: made.predict(X, verbose=0))
    assert_same(fit(made, callbacks=[other]), fit(alone))
    assert isinstance(other.result(), BusyModel)
    assert_same(values(made), values(alone))


def test_a_model_leaves_its_devices_between_the_calls_of_other_threads():
    made, alone = lockstep.distribute(model(), 3), model()
    other = Other(lambda: lockstep.release(made))
    right = alone.predict(X, verbose=0)
    assert_same(made.predict(X, batch_size=7, verbose=0, callbacks=[other]), right)
    assert other.result() is made
    assert holders(made) == {"ResourceVariable"}
    assert_same(made.predict(X, verbose=0), right)


@pytest.mark.whole
@pytest.mark.parametrize("change", ["release", "distribute"])
def test_a_callback_cannot_take_the_model_off_its_devices(change):
    class Changes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            lockstep.distribute(made, 3)  # where it is
            with pytest.raises(BusyModel, match=f"^{change} of {made.name!r} was called during"):
                lockstep.release(made) if change == "release" else lockstep.distribute(made, 2)
            told.append(batch)

    made, alone, told = lockstep.distribute(model(), 3), model(), []
    assert_same(fit(made, callbacks=[Changes()]), fit(alone))
    assert told
    assert_same(values(made), values(alone))
    assert holders(made) != {"ResourceVariable"}


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_test_begin"])
def test_compile_in_a_running_fit_is_refused_in_words(hook):
    """Keras removes the step functions, and then calls `None`."""
    assert_compile_is_refused_in(hook)
