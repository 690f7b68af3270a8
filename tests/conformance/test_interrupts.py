"""A signal never loses a value, whenever it comes.

A training step donates the arrays of the weights: they are gone once its program has been
called. The first call of a program runs Python code of JAX's after that, and a signal of that
moment raised `KeyboardInterrupt` before the new arrays were kept: every weight was lost.
"""

import itertools
import signal
import sys

import jax
import keras
import numpy as np
import pytest
from jax._src.interpreters import pxla
from keras.src import backend

import lockstep
from lockstep.core import held_signals
from tests.conformance.common import assert_same, weights

BATCH, STEPS = 4, 3
X = np.random.default_rng(1).normal(size=(BATCH * STEPS, 5)).astype("float32")
Y = np.random.default_rng(2).normal(size=(BATCH * STEPS, 2)).astype("float32")
OPTIONS = {"batch_size": BATCH, "verbose": 0}
DEVICES = pytest.mark.parametrize("devices", [1, 3])


class OwnLoops(keras.Sequential):
    """Its methods end in Keras's own loops, which call lockstep's step functions."""

    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)

    def evaluate(self, *args, **kwargs):
        return super().evaluate(*args, **kwargs)

    def predict(self, *args, **kwargs):
        return super().predict(*args, **kwargs)

    def train_on_batch(self, *args, **kwargs):
        return super().train_on_batch(*args, **kwargs)


CALLS = {
    "fit": lambda made: made.fit(X, Y, shuffle=False, **OPTIONS),
    "evaluate": lambda made: made.evaluate(X, Y, **OPTIONS),
    "predict": lambda made: made.predict(X, **OPTIONS),
    "train_on_batch": lambda made: made.train_on_batch(X[:BATCH], Y[:BATCH]),
    "test_on_batch": lambda made: made.test_on_batch(X, Y),
    "predict_on_batch": lambda made: made.predict_on_batch(X),
}
KINDS = pytest.mark.parametrize(
    ("make", "call"),
    [
        *((keras.Sequential, call) for call in CALLS),
        *((OwnLoops, call) for call in ("fit", "evaluate", "predict", "train_on_batch")),
    ],
)


def model(make=keras.Sequential):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(3, activation="tanh"), keras.layers.BatchNormalization()]
    made = make([keras.Input((5,)), *layers, keras.layers.Dense(2)])
    made.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    made.optimizer.build(made.trainable_variables)
    return made


def variables(made):
    return [*made.variables, *made.optimizer.variables]


def values(made):
    return [np.asarray(variable.value) for variable in variables(made)]


def truth(call):
    """The values before each step of this call and after the last one, by Keras on one device."""
    alone = model()
    found = [values(alone)]
    number = {"fit": STEPS, "train_on_batch": 1}.get(call, 0)
    for rows in itertools.islice(np.split(np.arange(len(X)), STEPS), number):
        alone.train_on_batch(X[rows], Y[rows])
        found.append(values(alone))
    return found


def step_of(made, right):
    """After how many steps a model has all its values."""
    found = values(made)
    near = [all(map(lambda a, b: np.allclose(a, b, atol=1e-5), found, each)) for each in right]
    assert sum(near) == 1, f"the values of no step: {near}"
    return near.index(True)


@pytest.fixture
def at_first_call(monkeypatch):
    """Sends signals when a program that takes the weights has been called for the first time."""

    def send(*numbers):
        real = pxla.ExecuteReplicated.__call__
        sent = []

        def call(self, *arrays):
            outputs = real(self, *arrays)
            takes_weights = any(getattr(array, "shape", None) == (5, 3) for array in arrays)
            if takes_weights and len(arrays) > 4 and not sent:
                sent.append([isinstance(a, jax.Array) and a.is_deleted() for a in arrays])
                for number in numbers:
                    signal.raise_signal(number)
            return outputs

        monkeypatch.setattr(pxla.ExecuteReplicated, "__call__", call)
        return sent

    return send


@pytest.mark.each_value_once
@DEVICES
@KINDS
def test_in_the_first_call_of_a_program(make, call, devices, at_first_call, tmp_path):
    right = truth(call)
    made = lockstep.distribute(model(make), devices)
    before = signal.getsignal(signal.SIGINT)
    sent = at_first_call(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        CALLS[call](made)
    assert signal.getsignal(signal.SIGINT) is before
    assert len(sent) == 1
    assert any(sent[0]) == (call in ("fit", "train_on_batch"))
    # Read before anything else is called, which would put values back.
    steps = step_of(made, right)
    assert steps == int(any(sent[0]))
    made.save(tmp_path / "made.keras")
    alone = keras.models.load_model(tmp_path / "made.keras", {"OwnLoops": OwnLoops})
    assert_same(weights(alone), weights(made), atol=0)
    mine, theirs = CALLS["fit"](made).history, CALLS["fit"](alone).history
    assert_same(mine["loss"], theirs["loss"])
    assert_same(values(made), values(alone))


@DEVICES
def test_signals_of_the_scripts_own_handlers_are_held_back_too(devices, at_first_call):
    """Each of them is handled once, although the first of them raises."""

    def terminate(number, frame):
        handled.append(number)
        raise SystemExit(143)

    handled = []
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        made = lockstep.distribute(model(), devices)
        at_first_call(signal.SIGTERM, signal.SIGINT)
        with pytest.raises((SystemExit, KeyboardInterrupt)) as raised:
            CALLS["fit"](made)
        assert signal.getsignal(signal.SIGTERM) is terminate
    finally:
        signal.signal(signal.SIGTERM, before)
    assert {type(raised.value), type(raised.value.__context__)} == {SystemExit, KeyboardInterrupt}
    assert handled == [signal.SIGTERM]
    assert step_of(made, truth("fit")) == 1


def test_a_handler_that_a_callback_installs_at_the_beginning_is_held_back(at_first_call):
    def stop(number, frame):
        raise InterruptedError

    class Installs(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.before = signal.signal(signal.SIGUSR1, stop)

    made, installs = lockstep.distribute(model(), 3), Installs()
    at_first_call(signal.SIGUSR1)
    try:
        with pytest.raises(InterruptedError):
            made.fit(X, Y, shuffle=False, **OPTIONS, callbacks=[installs])
        assert signal.getsignal(signal.SIGUSR1) is stop
    finally:
        signal.signal(signal.SIGUSR1, installs.before)
    assert step_of(made, truth("fit")) == 1


def test_a_handler_that_does_not_raise_is_called_and_the_fit_goes_on(at_first_call):
    handled = []
    before = signal.signal(signal.SIGTERM, lambda *_: handled.append(len(handled)))
    try:
        made = lockstep.distribute(model(), 3)
        at_first_call(signal.SIGTERM)
        CALLS["fit"](made)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handled == [0]
    assert step_of(made, truth("fit")) == STEPS


@pytest.mark.parametrize("make", [keras.Sequential, OwnLoops])
def test_a_callback_that_swallows_one_interrupt_can_be_interrupted_again(make):
    class Swallows(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                if batch == 1:
                    raise
                swallowed.append(batch)

    made, swallowed = lockstep.distribute(model(make), 3), []
    with pytest.raises(KeyboardInterrupt):
        made.fit(X, Y, shuffle=False, **OPTIONS, callbacks=[Swallows()])
    assert swallowed == [0]
    assert step_of(made, truth("fit")) == 2  # after an exception, signals wait for the next step


@pytest.mark.parametrize("make", [keras.Sequential, OwnLoops])
def test_while_a_log_is_fetched(make, monkeypatch):
    """Keras's `pythonify_logs` catches every exception, and waits for the steps that are queued."""
    fetch, fetched = backend.convert_to_numpy, []

    def interrupted(value):
        fetched.append(value)
        if len(fetched) == 1:
            signal.raise_signal(signal.SIGINT)
        return fetch(value)

    made = lockstep.distribute(model(make), 3)
    at_each_batch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: dict(logs))
    monkeypatch.setattr(backend, "convert_to_numpy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.fit(X, Y, shuffle=False, **OPTIONS, callbacks=[at_each_batch])
    monkeypatch.undo()
    assert step_of(made, truth("fit")) < STEPS


class Stops:
    """Sends SIGINT before a certain line of the code that has the values in its hands."""

    def __init__(self, line):
        self.left = line

    def __enter__(self):
        sys.settrace(self._called)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _called(self, frame, event, arg):
        name = frame.f_code.co_filename
        watched = "/lockstep/engines/" in name or name.endswith("/backend/jax/trainer.py")
        # The handler of a signal, and what calls it, has to raise.
        return self._line if watched and name != held_signals.__file__ else None

    def _line(self, frame, event, arg):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self._line


@pytest.mark.thorough
@pytest.mark.each_value_once
@DEVICES
@KINDS
def test_before_any_line(make, call, devices):
    """Where half of the values had been put back, the others were unreadable."""
    right = truth(call)
    made = lockstep.distribute(model(make), devices)
    start = values(made)
    CALLS[call](made)
    every = len(variables(made))
    interrupted, line = 0, 0
    for line in itertools.count(1, 13):
        for variable, value in zip(variables(made), start, strict=True):
            variable.assign(value)
        try:
            with Stops(line) as stops:
                CALLS[call](made)
        except KeyboardInterrupt:
            interrupted += 1
        if stops.left > 0:
            break
        assert len(variables(made)) == every
        step_of(made, right)
        made.get_weights()
    assert interrupted > 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not held_signals.held
