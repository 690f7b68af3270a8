"""On an accelerator a thread gathers the rows of large batches, where nobody can tell."""

import threading
import time

import keras
import numpy as np
import pytest

import lockstep
from lockstep.engines.jax.fit import prefetch
from lockstep.engines.jax.on_devices.arrays import Arrays
from lockstep.engines.jax.steps import steps
from lockstep.engines.jax.steps.ahead import Ahead
from lockstep.engines.jax.steps.input import HostIterator
from tests.conformance import common
from tests.conformance.agreement import assert_agrees
from tests.conformance.common import assert_same, weights
from tests.conformance.side_by_side import BATCH, smooth
from tests.conformance.test_callback_hooks import everything

X, Y = common.data(7 * BATCH)
HELD_OUT = common.data(2 * BATCH)


@pytest.fixture
def accelerators(monkeypatch):
    """Devices that count as such, and batches that all count as large."""
    monkeypatch.setattr(steps, "looks_ahead", lambda devices: True)
    monkeypatch.setattr(prefetch, "WORTH_IT", 1)


@pytest.fixture
def gathered(monkeypatch):
    """The threads that gathered the rows of a batch, but for the one that a model is built on."""
    by = []
    batch, build = Arrays.batch, HostIterator.build

    def noting(self, rows):
        by.append(threading.current_thread())
        return batch(self, rows)

    def built(self, building):
        before = len(by)
        build(self, building)
        del by[before:]

    monkeypatch.setattr(Arrays, "batch", noting)
    monkeypatch.setattr(HostIterator, "build", built)
    return by


def in_turn(gathered):
    """Whether the rows of all batches, some at least, were gathered by the caller."""
    return bool(gathered) and set(gathered) == {threading.main_thread()}


def in_a_thread(gathered):
    """Whether the rows of all batches, some at least, were gathered by others."""
    return bool(gathered) and threading.main_thread() not in gathered


class AtEpochs(keras.callbacks.Callback):
    """Code of a user's between two epochs: it writes into rows."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def on_epoch_end(self, epoch, logs=None):
        self.rows *= 0.9


class AtBatches(keras.callbacks.Callback):
    """Code of a user's between two steps: it writes into rows of the next batch."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def on_train_batch_end(self, batch, logs=None):
        self.rows *= 0.9


def train(made, **options):
    rows = X.copy()
    options = {"batch_size": BATCH, "epochs": 3, "verbose": 0, **options}
    if "callback" in options:
        options["callbacks"] = [options.pop("callback")(rows)]
    np.random.seed(3)
    history = made.fit(rows, Y, **options).history
    return [history, weights(made), np.random.random()]


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize(("devices", "times"), [(1, 1), (4, 3)])
def test_every_call_has_the_numbers_of_batches_in_their_turn(devices, times, gathered):
    def calls(**asked):
        made = smooth()
        made.steps_per_execution = times
        lockstep.distribute(made, devices, data_on_devices=False, **asked)
        history = train(made, validation_data=HELD_OUT)
        evaluated = made.evaluate(X, Y, batch_size=BATCH, verbose=0)
        predicted = made.predict(X, batch_size=BATCH, verbose=0)
        return [history, evaluated, predicted, everything(made)]

    right = calls(prefetch=0)
    assert in_turn(gathered)
    gathered.clear()
    assert_same(calls(), right, atol=0)
    assert in_a_thread(gathered)


@pytest.mark.usefixtures("accelerators")
def test_two_batches_are_gathered_while_a_step_runs(gathered, monkeypatch):
    seen = []
    look = Ahead.look

    def waiting(self, *given):
        """After the first step: until as many are there as are to be, and for more."""
        if not seen:
            until = time.monotonic() + 60
            while len(gathered) < 3 and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.3)
            seen.append(len(gathered))
        look(self, *given)

    monkeypatch.setattr(Ahead, "look", waiting)
    train(lockstep.distribute(smooth(), 2, data_on_devices=False), epochs=1)
    assert seen == [3]  # one runs, two are ready
    assert in_a_thread(gathered)


@pytest.mark.usefixtures("accelerators")
def test_rows_that_are_written_into_between_epochs_are_those_of_one_device(gathered):
    right = train(smooth(), callback=AtEpochs)
    made = lockstep.distribute(smooth(), 3, data_on_devices=False)
    assert_same(train(made, callback=AtEpochs), right)
    assert in_a_thread(gathered)


@pytest.mark.usefixtures("accelerators")
def test_a_pass_that_goes_on_has_rows_that_were_written_into_after_a_stop():
    class StopsThenWrites(AtEpochs):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.stop_training = True  # after one step

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = False
            super().on_epoch_end(epoch)

    def trained(**asked):
        made = lockstep.distribute(smooth(), 2, data_on_devices=False, **asked)
        return train(made, callback=StopsThenWrites, steps_per_epoch=3)

    assert_same(trained(), trained(prefetch=0), atol=0)


def among_others(rows):
    return keras.callbacks.CallbackList([AtBatches(rows)])


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("callback", [AtBatches, among_others])
def test_a_callback_that_may_write_between_steps_has_no_thread_beside_it(callback, gathered):
    made = lockstep.distribute(smooth(), 3, data_on_devices=False)
    unasked = train(made, callback=callback)
    assert in_turn(gathered)
    made = lockstep.distribute(smooth(), 3, data_on_devices=False, prefetch=0)
    assert_same(unasked, train(made, callback=callback), atol=0)


@pytest.mark.usefixtures("accelerators")
def test_a_hook_that_is_put_in_place_between_two_epochs_is_heeded(gathered):
    class Hooked(keras.callbacks.Callback):
        def __init__(self, rows):
            super().__init__()
            self.rows, self.left = rows, []

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                self.on_train_batch_end = self.write
                self.left.append(in_a_thread(gathered))
                gathered.clear()

        def write(self, batch, logs=None):
            self.rows *= 0.9

    noted = []

    def callback(rows):
        noted.append(Hooked(rows))
        return noted[-1]

    made = lockstep.distribute(smooth(), 3, data_on_devices=False)
    unasked = train(made, callback=callback)
    assert noted[-1].left == [True]
    assert in_turn(gathered)
    made = lockstep.distribute(smooth(), 3, data_on_devices=False, prefetch=0)
    assert_same(unasked, train(made, callback=callback), atol=0)


@pytest.mark.usefixtures("accelerators")
def test_a_model_that_is_released_within_a_fit_has_no_thread_any_more(gathered):
    class Releases(keras.callbacks.Callback):
        def __init__(self, rows):
            super().__init__()

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                assert in_a_thread(gathered)
                gathered.clear()
                lockstep.release(self.model)

    right = train(smooth())
    gathered.clear()
    made = lockstep.distribute(smooth(), 3, data_on_devices=False)
    assert_same(train(made, callback=Releases), right)
    assert in_turn(gathered)


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize(
    ("asked", "options", "model"),
    [
        ({"prefetch": 0}, {}, {}),
        ({}, {"shuffle": "batch"}, {}),
        ({}, {"batch_size": len(X)}, {}),  # one batch, of which none is ahead
        ({}, {}, {"run_eagerly": True}),
        ({}, {}, {"jit_compile": False}),
    ],
)
def test_in_their_turn_where_it_could_be_told(asked, options, model, gathered):
    made = smooth()
    for name, value in model.items():
        setattr(made, name, value)
    train(lockstep.distribute(made, 2, data_on_devices=False, **asked), **options)
    assert in_turn(gathered)


@pytest.mark.usefixtures("accelerators")
def test_in_their_turn_while_the_step_is_the_one_that_runs_operation_by_operation(gathered):
    made = smooth()
    made.jit_compile = False
    lockstep.distribute(made, 2, data_on_devices=False)
    train(made)
    made.jit_compile = True  # which Keras heeds when it makes the next function
    train(made)
    assert in_turn(gathered)


class Lazy:
    """Rows that are made when NumPy asks for them."""

    def __init__(self, rows):
        self.rows, self.shape, self.dtype, self.ndim = rows, rows.shape, rows.dtype, rows.ndim

    def __len__(self):
        return len(self.rows)

    def __array__(self, dtype=None, copy=None):
        return self.rows + np.random.normal(size=self.shape).astype("float32")


class Noisy(np.ndarray):
    """Rows that draw random numbers when they are asked for."""

    def take(self, *args, **kwargs):
        rows = np.asarray(self).take(*args, **kwargs)
        return rows + np.random.normal(size=rows.shape).astype("float32")


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("of", [Lazy, lambda rows: rows.view(Noisy)], ids=["lazy", "subclass"])
def test_rows_that_run_code_of_their_own_are_asked_for_as_before(of, gathered):
    def calls(**asked):
        made = lockstep.distribute(smooth(), 2, data_on_devices=False, **asked)
        np.random.seed(3)
        made.fit(of(X), Y, batch_size=BATCH, epochs=2, verbose=0)
        evaluated = made.evaluate(of(X), Y, batch_size=BATCH, verbose=0)
        return [weights(made), evaluated, np.random.random()]

    unasked = calls()
    assert in_turn(gathered)
    assert_same(unasked, calls(prefetch=0), atol=0)


@pytest.mark.usefixtures("accelerators")
def test_no_thread_is_left_after_a_call():
    made = lockstep.distribute(smooth(), 2, data_on_devices=False)
    for _ in range(20):
        made.predict(X, batch_size=BATCH, verbose=0)
        assert "lockstep-input" not in [thread.name for thread in threading.enumerate()]


def test_in_their_turn_on_cpus(gathered, monkeypatch):
    monkeypatch.setattr(prefetch, "WORTH_IT", 1)
    train(lockstep.distribute(smooth(), 2))
    assert in_turn(gathered)


@pytest.mark.parametrize(("rows", "thread"), [(1000, False), (1024, True)])
def test_large_are_batches_of_a_mebibyte(rows, thread, gathered, monkeypatch):
    monkeypatch.setattr(steps, "looks_ahead", lambda devices: True)
    made = keras.Sequential([keras.Input((128,)), keras.layers.Dense(128)])
    made.compile("sgd", "mse")
    lockstep.distribute(made, 2, data_on_devices=False)
    x = np.ones((2 * rows, 128), "float32")
    made.fit(x, x, batch_size=rows, verbose=0)
    assert (in_a_thread if thread else in_turn)(gathered)


@pytest.mark.usefixtures("accelerators")
def test_data_that_stay_on_the_devices_are_gathered_there(gathered):
    train(lockstep.distribute(smooth(), 2, data_on_devices=True))
    assert gathered == []


@pytest.mark.usefixtures("accelerators")
def test_a_generator_is_drawn_by_the_caller():
    drawn = []

    def data():
        for start in range(0, len(X), BATCH):
            drawn.append(threading.current_thread())
            yield X[start : start + BATCH], Y[start : start + BATCH]

    made = lockstep.distribute(smooth(), 2)
    made.fit(data(), steps_per_epoch=7, shuffle=False, verbose=0)
    assert in_turn(drawn)


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("case", ["NumPy dict", "NumPy, shuffled", "NumPy, steps_per_epoch"])
def test_arrays_give_what_they_give_one_device(case, monkeypatch):
    monkeypatch.setitem(lockstep.distribute.__kwdefaults__, "data_on_devices", False)
    assert_agrees("Data", case, 4)
