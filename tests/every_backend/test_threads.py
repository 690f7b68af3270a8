"""One thread at a time is in the calls of a model: others wait, or are refused during a `fit`."""

import threading

import keras
import numpy as np
import pytest

import lockstep
from lockstep.attach.attachment import session_of
from lockstep.errors import BusyModel
from tests.agreement import assert_equal, values
from tests.conformance.common import assert_compile_is_refused_in, data
from tests.conftest import BACKEND
from tests.every_backend.test_in_place import model
from tests.tables import Table
from tests.tiers import further, quick_on_jax

X, Y = data(21)


def numpy_of(outputs):
    return np.array(keras.ops.convert_to_numpy(keras.ops.stop_gradient(outputs)))


def devices_of(made):
    session = session_of(made)
    return 1 if session is None else len(session.devices)


OPTIONS = {"batch_size": 7, "verbose": 0}
CALLS = Table(
    {
        "predict": lambda made: made.predict(X, **OPTIONS),
        "evaluate": lambda made: made.evaluate(X, Y, **OPTIONS),
        "predict_on_batch": lambda made: made.predict_on_batch(X),
        "call": lambda made: numpy_of(made(X)),
    }
)


REFUSED = [*CALLS, "fit"]
if BACKEND != "jax":  # direct calls take turns on JAX alone
    REFUSED = ["predict", *further("evaluate", "predict_on_batch", "fit")]


class Own(keras.Sequential):
    """Its own loops, which are those of Keras."""

    def evaluate(self, *args, **kwargs):
        return super().evaluate(*args, **kwargs)

    def predict(self, *args, **kwargs):
        return super().predict(*args, **kwargs)


def own():
    keras.utils.set_random_seed(5)
    made = Own([keras.Input((4,)), keras.layers.Dense(2)])
    made.compile("sgd", "mse")
    return made


class InTheMiddle(keras.callbacks.Callback):
    """Lets other threads begin while the call is in its first batch, and looks what they do."""

    def __init__(self, *calls):
        super().__init__()
        self.found = [None] * len(calls)
        self.threads = [
            threading.Thread(target=self._run, args=(number, call), name=f"other{number}")
            for number, call in enumerate(calls)
        ]

    def _run(self, number, call):
        try:
            self.found[number] = call()
        except Exception as error:
            self.found[number] = error

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            for thread in self.threads:
                thread.start()
            for thread in self.threads:
                thread.join(0.2)  # time to fail in; who waits its turn is waited for later

    on_test_batch_end = on_predict_batch_end = on_train_batch_end

    def results(self):
        for thread in self.threads:
            thread.join(120)
            assert not thread.is_alive()
        return self.found


@quick_on_jax
@pytest.mark.each_value_once
@pytest.mark.parametrize("make", [model, own])
@pytest.mark.parametrize("first", ["predict", "evaluate"])
@pytest.mark.parametrize("devices", [1, 3])
def test_calls_during_another_threads_predict_wait_for_their_turn(make, first, devices):
    made, alone = lockstep.distribute(make(), devices), make()
    before = values(alone)
    right = {name: call(alone) for name, call in CALLS.items()}
    others = InTheMiddle(*(lambda call=call: call(made) for call in CALLS.values()))
    y = {"y": Y} if first == "evaluate" else {}
    found = getattr(made, first)(x=X, **y, **OPTIONS, callbacks=[others])
    assert_equal(found, right[first])
    assert_equal(others.results(), list(right.values()))
    assert all(map(np.array_equal, values(made), before))


@pytest.mark.parametrize("call", REFUSED)
def test_calls_during_another_threads_fit_are_refused(call):
    made, alone = lockstep.distribute(model(), 3), model()
    calls = {**CALLS, "fit": lambda made: made.fit(X, Y, **OPTIONS)}
    others = InTheMiddle(lambda: calls[call](made))
    made.fit(X, Y, shuffle=False, **OPTIONS, callbacks=[others])
    (error,) = others.results()
    assert isinstance(error, BusyModel)
    # Keras says around it which layer was called.
    assert f"{call} of {made.name!r} was called in thread 'other0', while" in str(error)
    alone.fit(X, Y, shuffle=False, **OPTIONS)
    assert_equal(values(made), values(alone))
    calls[call](made)


@quick_on_jax
def test_a_stateless_call_during_another_threads_fit_is_none_of_the_models():
    """It is given values, as an actor is that plays while the learner trains."""
    made = lockstep.distribute(model(), 3)
    given = [
        [v.value + 0 for v in group]
        for group in (made.trainable_variables, made.non_trainable_variables)
    ]
    right = numpy_of(made(X))
    others = InTheMiddle(lambda: numpy_of(made.stateless_call(*given, X)[0]))
    made.fit(X, Y, **OPTIONS, callbacks=[others])
    assert_equal(others.results(), [right])


@pytest.mark.parametrize(
    "change", [lockstep.release, *further(lambda made: lockstep.distribute(made, 2))]
)
def test_a_model_leaves_its_devices_between_the_calls_of_other_threads(change):
    """Those that waited run on the new devices."""
    made, alone = lockstep.distribute(model(), 3), model()
    others = InTheMiddle(lambda: change(made) and None, lambda: CALLS["predict"](made))
    found = made.predict(X, **OPTIONS, callbacks=[others])
    right = alone.predict(X, **OPTIONS)
    assert_equal([found, others.results()[1]], [right, right])
    assert others.results()[0] is None
    assert devices_of(made) == (1 if change is lockstep.release else 2)
    assert_equal(
        made.fit(X, Y, **OPTIONS, shuffle=False).history,
        alone.fit(X, Y, **OPTIONS, shuffle=False).history,
    )


@quick_on_jax
@pytest.mark.parametrize("name", ["release", "distribute"])
def test_a_model_stays_on_its_devices_during_another_threads_fit(name):
    made = lockstep.distribute(model(), 3)
    change = {"release": lockstep.release, "distribute": lambda made: lockstep.distribute(made, 2)}
    others = InTheMiddle(lambda: change[name](made))
    made.fit(X, Y, **OPTIONS, callbacks=[others])
    (error,) = others.results()
    assert isinstance(error, BusyModel)
    assert devices_of(made) == 3
    change[name](made)
    assert devices_of(made) == (1 if name == "release" else 2)


@quick_on_jax
@pytest.mark.each_value_once
@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("name", ["release", "distribute"])
def test_a_callback_cannot_take_the_model_off_its_devices(call, name):
    class Changes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            lockstep.distribute(self.model, 3)  # where it is
            with pytest.raises(BusyModel) as refused:
                lockstep.release(made) if name == "release" else lockstep.distribute(made, 2)
            told.append(str(refused.value))

        on_test_batch_end = on_predict_batch_end = on_epoch_end = on_train_batch_end

    made, alone, told = lockstep.distribute(model(), 3), model(), []
    y, shuffle = {"y": Y} if call != "predict" else {}, {"shuffle": False} if call == "fit" else {}
    for each, callbacks in ((made, [Changes()]), (alone, [])):
        getattr(each, call)(x=X, **y, **OPTIONS, **shuffle, callbacks=callbacks)
    assert len(told) == (4 if call == "fit" else 3)
    assert told[0] == (
        f"{name} of {made.name!r} was called during its {call}, for example by a callback. The "
        "devices of a model\n"
        f"cannot change during a call. Call {name} before or after it."
    )
    assert_equal(values(made), values(alone))
    assert devices_of(made) == 3


@pytest.mark.parametrize(
    "hook", ["on_train_batch_end", *further("on_train_begin", "on_test_begin")]
)
def test_compile_in_a_running_fit_is_refused_in_words(hook):
    """Keras removes the step functions, and then calls `None`."""
    assert_compile_is_refused_in(hook)
