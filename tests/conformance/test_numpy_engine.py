"""The interface of an engine is what the core needs: NumPy arithmetic trains on N devices."""

import dis
import signal
import sys

import keras
import numpy as np
import pytest

import lockstep
from lockstep.core import held_signals
from lockstep.core.engine import TRAIN
from lockstep.errors import BusyModel, DeviceError, UnsupportedBackend, UnsupportedModel
from tests.agreement import values
from tests.conformance import numpy_engine
from tests.conformance.common import assert_same, weights
from tests.conformance.numpy_engine import NumPyEngine, NumPySession
from tests.conformance.side_by_side import data, held_out, train
from tests.conformance.test_loop import Notes, run_all


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch):
    # `lockstep.distribute` is the function; its module has the same name.
    monkeypatch.setattr(sys.modules["lockstep.distribute"], "current_engine", NumPyEngine)


def network(loss="mse"):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    layers += [keras.layers.Dropout(0.2), keras.layers.Dense(2)]
    made = keras.Sequential([keras.Input((4,)), *layers])
    if loss == "mse":
        made.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["mae"])
    else:
        entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(keras.optimizers.SGD(0.05, momentum=0.9), entropy, metrics=["accuracy"])
    made.optimizer.build(made.trainable_variables)
    return made


def line():
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    made.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    made.optimizer.build(made.trainable_variables)
    return made


@pytest.mark.parametrize("devices", [1, 3])
def test_calls_logs_and_weights_are_those_of_keras(devices):
    found = []
    for made in (network(), lockstep.distribute(network(), devices)):
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


def test_classes_with_weighted_rows_and_a_last_batch_that_is_smaller():
    x, y = data()[0][:23], np.arange(23) % 2
    found = []
    for made in (network("classes"), lockstep.distribute(network("classes"), 4)):
        history = made.fit(
            x, y, sample_weight=y + 0.5, batch_size=7, epochs=2, shuffle=False, verbose=0
        )
        found.append((history.history, weights(made)))
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert_same(mine, theirs)


def test_a_model_is_on_one_device_again_after_release():
    made, plain = lockstep.distribute(line()), line()
    assert isinstance(vars(made)["_lockstep"].session, NumPySession)
    attributes = set(vars(made)) - set(vars(plain))
    lockstep.release(made)
    assert not attributes & set(vars(made))
    assert_same(train(made), train(plain))


def test_what_the_engine_does_not_know_is_refused_before_anything_changes():
    deep = keras.Sequential([keras.Input((4, 1)), keras.layers.Flatten()])
    before = set(vars(deep))
    with pytest.raises(UnsupportedModel, match="no layer that NumPy has"):
        lockstep.distribute(deep)
    assert set(vars(deep)) == before
    with pytest.raises(DeviceError, match="devices=5"):
        lockstep.distribute(line(), devices=5)
    with pytest.raises(UnsupportedBackend) as caught:
        lockstep.distribute(line(), devices=2, state="sharded")
    assert str(caught.value) == (
        'state="sharded" was requested, but \'numpy\' supports only state="replicated".\n'
        'Remove state="sharded".'
    )


@pytest.mark.parametrize("place", ["open", "methods", "step_function"])
def test_a_session_that_fails_to_open_leaves_the_model_as_it_was(place, monkeypatch):
    made, right = line(), train(line())
    made.make_train_function()  # so that it is made anew while the session opens
    lockstep.distribute(made, devices=2)

    def fail(*args, **kwargs):
        if fail.broken:
            fail.broken = False
            raise OSError("no more")
        return known(*args, **kwargs)

    fail.broken, known = True, getattr(NumPySession, place)
    monkeypatch.setattr(NumPySession, place, fail)
    with pytest.raises(OSError, match="no more"):
        lockstep.distribute(made, devices=3)
    assert vars(made)["_lockstep"].session.devices == ("cpu:0", "cpu:1")
    assert_same(train(made), right)


class Reads(keras.callbacks.Callback):
    """Does what only a callback can, between two steps."""

    def __init__(self, read):
        super().__init__()
        self.read, self.found = read, []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(self.read(self.model))


def test_a_callback_reads_the_values_of_each_step_after_a_sync():
    x, y = data()

    def kernel(made):
        attachment = vars(made).get("_lockstep")
        if attachment is not None:
            assert np.isnan(made.layers[0].kernel).all(), "the state is outside"
            attachment.session.sync()
        return np.array(made.layers[0].kernel)

    alone, made, reads = line(), lockstep.distribute(line(), 3), Reads(kernel)
    train(made, [reads], epochs=1)
    assert len(reads.found) == 7
    for rows, found in zip(np.split(np.arange(len(x)), 7), reads.found, strict=True):
        alone.train_on_batch(x[rows], y[rows])
        assert_same(found, kernel(alone))


def test_a_model_is_not_released_within_its_fit():
    made, caught = lockstep.distribute(line(), 2), []

    def release(model):
        with pytest.raises(BusyModel) as error:
            lockstep.release(model)
        caught.append(str(error.value).splitlines()[0])

    train(made, [Reads(release)], epochs=1)
    assert (
        caught[0]
        .partition(" was")[2]
        .startswith(" called during its fit, for example by a callback")
    )


@pytest.mark.parametrize("after", [1, 4, 6])
def test_a_checkpoint_goes_on_within_an_epoch_on_other_devices(after, tmp_path):
    whole = network()
    right = train(whole, epochs=2)

    class Stop(keras.callbacks.Callback):
        after = None

        def get_state(self):
            return {}

        def set_state(self, state):
            pass

        def on_train_batch_end(self, batch, logs=None):
            if batch == self.after:
                raise KeyboardInterrupt

    def goes_on(devices, after):
        made, stop = lockstep.distribute(network(), devices), Stop()
        stop.after = after
        found = train(made, [lockstep.Checkpoint(tmp_path, steps=2), stop], epochs=2)
        return made, found

    with pytest.raises(KeyboardInterrupt):
        goes_on(3, after)
    again, history = goes_on(2, None)
    assert_same(weights(again), weights(whole))
    assert_same(history["loss"][-1], right["loss"][-1])
    assert int(np.asarray(again.optimizer.iterations)) == 14


# ---------------------------------------------------------------------------- interrupts

X, Y = np.ones((4, 4), "float32"), np.zeros((4, 2), "float32")
FILES = (held_signals.__file__, numpy_engine.__file__)
NAMES = ("step", "take_out", "put_back", "begin", "finish", "__enter__", "__exit__", "_end")


RETURNS = {dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap}


class At:
    """Sends Ctrl-C at one of the boundaries between two bytecodes of an epoch and its steps."""

    def __init__(self, number):
        self.number, self.seen = number, 0

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename in FILES and frame.f_code.co_name in NAMES:
            frame.f_trace = self.watch  # Python 3.13 needs it before the next line
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return self.watch
        return None

    def watch(self, frame, event, argument):
        # Python handles no signal at a return.
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] not in RETURNS:
            self.seen += 1
            if self.seen == self.number:
                self.place = frame.f_code.co_name, frame.f_lineno, frame.f_lasti
                signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)  # as Python would now
        return self.watch


def after_steps(steps):
    alone = line()
    for _ in range(steps):
        alone.train_on_batch(X, Y)
    return [np.array(v.value) for v in (*alone.trainable_variables, *alone.optimizer.variables)]


def interrupted(made, number):
    """Train one step with Ctrl-C at this boundary; return how many there are."""
    before, at = sys.gettrace(), At(number)
    session = vars(made)["_lockstep"].session
    sys.settrace(at)
    try:
        with session.epoch(TRAIN, None, None) as execute:
            execute(iter([(X, Y)]), 1)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return at


def test_an_interrupt_at_any_moment_leaves_the_state_before_a_step_or_after_it():
    made = lockstep.distribute(line(), 2)
    made.make_train_function()
    start = values(made)
    moments = interrupted(made, 0).seen
    assert moments > 200, "the boundaries are seen"
    right = [after_steps(0), after_steps(1)]
    ends = []
    for number in range(1, moments + 1):
        for variable, value in zip(
            (*made.variables, *made.optimizer.variables), start, strict=True
        ):
            variable.assign(value)
        place = interrupted(made, number).place
        found = [np.array(v.value) for v in (*made.trainable_variables, *made.optimizer.variables)]
        near = [all(map(np.allclose, found, each)) for each in right]
        assert sum(near) == 1, f"{place}: the values of no step"
        ends.append(near.index(True))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, place
        assert not held_signals.held
    assert set(ends) == {0, 1}, "some interrupts come before the step, and some after it"
