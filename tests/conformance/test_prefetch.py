"""A thread makes batches ready before their turn, and nothing else changes."""

import threading
import time

import keras
import numpy as np
import pytest

import lockstep
from lockstep.engines import current_engine
from lockstep.engines.attachments import attached
from lockstep.errors import DataOnHostWarning, UnusableData
from lockstep.training.prefetch_queue import of, of_rows
from tests.conformance import common
from tests.conformance.cases import FAMILIES
from tests.conformance.common import assert_same, weights
from tests.conformance.side_by_side import BATCH, smooth
from tests.conformance.test_callback_hooks import everything
from tests.conformance.test_cases import DEVICES
from tests.processes.common import warm_python

X, Y = common.data(7 * BATCH)
PIECES = [(X[i * BATCH :][:BATCH], Y[i * BATCH :][:BATCH]) for i in range(7)]
AHEAD = 2

SAMPLED = {
    *("NumPy, shuffled", "generator of changing batch sizes", "generator that does not end"),
    *("PyDataset, 2 threads", "torch DataLoader", "tf.data, repeated", "Grain IterDataset"),
}
"""The fixed sample asks these alone; iterators of the others differ in what they yield."""


class Items(keras.utils.PyDataset):
    """Seven batches, one of which may fail; notes when each is asked for."""

    def __init__(self, notes, fails=None):
        super().__init__()
        self.notes, self.fails = notes, fails

    def __len__(self):
        return 7

    def __getitem__(self, index):
        self.notes.append(("drawn", index))
        if index == self.fails:
            raise OSError("the disk is gone")
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], Y[rows]


class Notes(keras.callbacks.Callback):
    """Looks at every loss, and notes when."""

    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def on_train_begin(self, logs=None):
        self.notes.clear()

    def on_train_batch_begin(self, batch, logs=None):
        self.notes.append(("begun", batch))

    def on_train_batch_end(self, batch, logs=None):
        assert logs["loss"] > 0
        self.notes.append(("done", batch))

    def get_state(self):
        return None

    def set_state(self, state):
        pass


class StopsEpochs(keras.callbacks.Callback):
    """Stops every epoch after its second step."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 1

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = False


def drawn_before_done(notes):
    """How many batches were drawn when each step was done."""
    return [
        sum(what == "drawn" for what, _ in notes[:position])
        for position, (what, _) in enumerate(notes)
        if what == "done"
    ]


def every_bit(made):
    """All that comes of arrays and a generator, with a callback that looks at every loss."""
    np.random.seed(3)
    x, y = common.data()
    options = {"verbose": 0, "callbacks": [Notes([])]}
    made.fit(x, y, batch_size=7, epochs=2, validation_data=(X, Y), **options)
    endless = ((x[i % 40 : i % 40 + 9], y[i % 40 : i % 40 + 9]) for i in range(100))
    made.fit(endless, steps_per_epoch=4, epochs=2, shuffle=False, **options)
    left = len(list(endless))
    predicted = made.predict(x, batch_size=7, verbose=0)
    evaluated = made.evaluate(x, y, batch_size=7, verbose=0)
    return left, predicted, evaluated, everything(made), np.random.random()


def iter_of(batches):
    yield from batches


def sources():
    """Every source on every number of devices, most of them under `--whole`."""
    for position, name in enumerate(FAMILIES["Data"]):
        if name == "NumPy, batches shuffled":  # below
            continue
        for devices in DEVICES["jax"]:
            sampled = name in SAMPLED and DEVICES["jax"][1 + position % 4] == devices
            yield pytest.param(name, devices, marks=[] if sampled else [pytest.mark.whole])


@pytest.mark.parametrize(("name", "devices"), [*sources()])
def test_every_source_gives_what_it_gives_one_device(name, devices, workers):
    far = workers("jax").difference("Data", name, devices, prefetch=AHEAD)
    assert not far, f"beyond the bound: {far}"


@pytest.mark.parametrize(("devices", "times"), [(1, 1), (4, 3)])
def test_no_bit_depends_on_who_draws_a_batch(devices, times):
    def train(prefetch):
        made = smooth()
        made.steps_per_execution = times
        return every_bit(lockstep.distribute(made, devices, prefetch=prefetch))

    assert_same(train(AHEAD), train(0), atol=0)


class Drawn:
    """Batches, which note the thread that draws each of them."""

    def __init__(self, notes=None):
        self.by = []
        self.notes = [] if notes is None else notes
        self.enough = threading.Event()

    def __iter__(self):
        for index, piece in enumerate(PIECES):
            self.by.append(threading.current_thread())
            self.notes.append(("drawn", index))
            if len(self.by) == 1 + AHEAD:
                self.enough.set()
            yield piece


class Waits(keras.callbacks.Callback):
    """Ends no first step before so many batches are drawn as are to be ahead."""

    def __init__(self, drawn):
        super().__init__()
        self.drawn = drawn

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            assert self.drawn.enough.wait(60)
            time.sleep(0.3)  # for more, if there were any
            self.seen = len(self.drawn.by)


def test_two_batches_are_made_while_a_callback_holds_the_first_step():
    drawn = Drawn()
    waits = Waits(drawn)
    made = lockstep.distribute(smooth(), 3, prefetch=AHEAD)
    made.fit(iter(drawn), steps_per_epoch=7, shuffle=False, verbose=0, callbacks=[waits])
    assert waits.seen == 1 + AHEAD
    others = {thread for thread in drawn.by if thread is not threading.main_thread()}
    assert len(others) == 1  # but for the first, at which Keras looks before
    right = smooth()
    right.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_same(weights(made), weights(right))


def test_rows_of_arrays_are_made_ahead_too():
    """A callback that writes into rows of the next batches comes too late for two of them."""

    class Writes(keras.callbacks.Callback):
        def __init__(self, rows):
            super().__init__()
            self.rows = rows

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                self.asked = time.monotonic()

        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                time.sleep(0.5)
                self.rows[:] = 0

    def train(made, zeros_from):
        rows = X.copy()
        if zeros_from is not None:
            rows[zeros_from * BATCH :] = 0
        callbacks = [Writes(rows)] if zeros_from is None else []
        made.fit(rows, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        return weights(made)

    one = train(smooth(), zeros_from=1)  # Keras draws each batch in its turn
    assert_same(train(lockstep.distribute(smooth(), 3), None), one)
    ahead = train(smooth(), zeros_from=1 + AHEAD)
    assert_same(train(lockstep.distribute(smooth(), 3, prefetch=AHEAD), None), ahead)


@pytest.mark.parametrize("steps", [3, 7])
def test_a_generator_loses_no_batch_at_the_end_of_an_epoch(steps):
    left = []
    for devices in (None, 2):
        made = smooth()
        if devices:
            lockstep.distribute(made, devices, prefetch=AHEAD)
        endless = (PIECES[index % 7] for index in range(50))
        made.fit(endless, steps_per_epoch=steps, epochs=2, shuffle=False, verbose=0)
        left.append(len(list(endless)))
    assert left[0] == left[1]


def test_rows_that_are_shuffled_within_batches_are_drawn_in_their_turn():
    def train(**asked):
        made = lockstep.distribute(smooth(), 3, **asked)
        made.fit(X, Y, batch_size=BATCH, epochs=2, shuffle="batch", verbose=0)
        return [*weights(made), np.random.random()]

    with pytest.warns(DataOnHostWarning, match="shuffle='batch' draws random numbers"):
        assert_same(train(prefetch=AHEAD), train(), atol=0)


@pytest.mark.parametrize("steps", [None, 4])
def test_a_stopped_pass_over_a_generator_leaves_what_it_has_made_to_the_next(steps):
    class Stops(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = batch == 2

        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = False

    def endless(seed):
        rng = np.random.default_rng(seed)
        for _ in range(100):
            yield (
                rng.normal(size=(BATCH, 4)).astype("float32"),
                rng.normal(size=(BATCH, 2)).astype("float32"),
            )

    def train(made):
        held_out = endless(8)
        options = {"shuffle": False, "verbose": 0, "callbacks": [Stops()]}
        options |= {"validation_data": held_out, "validation_steps": 6}
        history = made.fit(endless(7), steps_per_epoch=steps, epochs=4, **options).history
        return [history, weights(made)], len(list(held_out))

    one, left = train(smooth())
    ahead, left_ahead = train(lockstep.distribute(smooth(), 2, prefetch=AHEAD))
    assert_same(ahead, one)
    assert left - AHEAD <= left_ahead <= left


def test_data_that_wait_for_a_callback_that_has_stopped_are_not_waited_for():
    waiting = threading.Event()

    def data():
        yield from PIECES[:2]  # Keras looks at them before
        assert fed.wait(60)
        yield PIECES[2]
        waiting.set()
        never.wait(60)
        returned.append(True)

    class Feeds(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            fed.set()
            if batch == 2:
                assert waiting.wait(60)
                self.model.stop_training = True

    fed, never, returned = threading.Event(), threading.Event(), []
    made = lockstep.distribute(smooth(), 2, prefetch=AHEAD)
    made.fit(data(), shuffle=False, verbose=0, callbacks=[Feeds()])
    assert returned == []
    never.set()


FORKS = """
import multiprocessing, keras, numpy as np, lockstep

def batches():
    for _ in range(6):
        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join()
        assert child.exitcode == 0
        yield np.ones((4, 3), "float32"), np.ones((4, 1), "float32")

model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
lockstep.distribute(model, 2, prefetch=2)
model.compile("sgd", "mse")
model.fit(batches(), steps_per_epoch=6, shuffle=False, verbose=0)
print("trained")

def blocked():
    yield from [(np.ones((4, 3), "float32"), np.ones((4, 1), "float32"))] * 2
    time.sleep(3600)

class Interrupts(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt

import time
try:
    model.fit(blocked(), steps_per_epoch=5, shuffle=False, verbose=0, callbacks=[Interrupts()])
except KeyboardInterrupt:
    print("interrupted")
"""


def test_the_thread_keeps_neither_forked_processes_nor_python_from_ending():
    assert warm_python(FORKS, LOCKSTEP_REHEARSE="2").split()[-2:] == ["trained", "interrupted"]


def test_numpy_raises_in_the_thread_what_it_raises_for_the_caller():
    def data():
        for _ in range(5):
            x, y = PIECES[0]
            yield x * np.float32(1e38) * np.float32(1e38), y

    made = lockstep.distribute(smooth(), 2, prefetch=AHEAD)
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        made.fit(data(), shuffle=False, verbose=0)


def test_an_epoch_that_was_stopped_goes_on_where_it_was():
    found = []
    for devices in (None, 3):
        made = smooth()
        if devices:
            lockstep.distribute(made, devices, prefetch=AHEAD)
        options = {"steps_per_epoch": 5, "epochs": 3, "shuffle": False, "verbose": 0}
        made.fit(iter_of(PIECES), callbacks=[StopsEpochs()], **options)
        found.append(weights(made))
    assert_same(found[1], found[0])


def test_a_generator_can_be_gone_on_with_after_a_callback_has_failed():
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                assert at_it.wait(60)
                raise OSError("no room")

    def slow():
        for index, piece in enumerate(PIECES * 3):
            if index == 3:
                at_it.set()
                time.sleep(1)
            yield piece

    at_it = threading.Event()
    made = lockstep.distribute(smooth(), 2, prefetch=AHEAD)
    data = slow()
    with pytest.raises(OSError, match="no room"):
        made.fit(data, steps_per_epoch=7, shuffle=False, verbose=0, callbacks=[Fails()])
    assert len(list(data)) >= 21 - 2 - AHEAD  # not "generator already executing"


def test_ctrl_c_does_not_wait_for_data_that_do_not_come():
    class Interrupts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    interrupted, waited = threading.Event(), []

    def data():
        yield from PIECES[:2]  # Keras looks at them before
        waited.append(interrupted.wait(30))
        yield PIECES[2]

    made = lockstep.distribute(smooth(), 2, prefetch=AHEAD)
    with pytest.raises(KeyboardInterrupt):
        made.fit(data(), steps_per_epoch=3, shuffle=False, verbose=0, callbacks=[Interrupts()])
    assert waited == []
    interrupted.set()
    right = smooth()
    right.fit(*PIECES[0], batch_size=BATCH, shuffle=False, verbose=0)
    assert_same(weights(made), weights(right))


def test_what_fails_is_told_in_its_turn():
    notes = []
    made = lockstep.distribute(smooth(), 4, prefetch=AHEAD)
    with pytest.raises(OSError, match="the disk is gone"):
        made.fit(Items(notes, fails=3), shuffle=False, verbose=0, callbacks=[Notes(notes)])
    assert [number for what, number in notes if what == "done"] == [0, 1, 2]
    right = smooth()
    right.fit(X[: 3 * BATCH], Y[: 3 * BATCH], batch_size=BATCH, shuffle=False, verbose=0)
    assert_same(weights(made), weights(right))


def test_a_checkpoint_has_data_drawn_in_their_turn_and_says_so(tmp_path):
    notes = []
    made = lockstep.distribute(smooth(), 2, prefetch=AHEAD)
    callbacks = [Notes(notes), lockstep.Checkpoint(tmp_path / "run")]
    with pytest.warns(DataOnHostWarning, match="and a Checkpoint saves the position") as said:
        made.fit(Items(notes), shuffle=False, epochs=2, verbose=0, callbacks=callbacks)
    assert [one.category for one in said].count(DataOnHostWarning) == 1
    assert drawn_before_done(notes) == [*range(1, 15)]


def test_the_position_of_arrays_does_not_move(tmp_path):
    class Fails(keras.callbacks.Callback):
        def __init__(self, at):
            super().__init__()
            self.at = at

        def on_train_batch_end(self, batch, logs=None):
            if batch == self.at:
                raise OSError("the power is gone")

        def get_state(self):
            return None

        def set_state(self, state):
            pass

    def train(made, at, *callbacks):
        options = {"batch_size": BATCH, "epochs": 2, "verbose": 0}
        made.fit(X, Y, callbacks=[Fails(at), *callbacks], **options)
        return everything(made)

    whole = train(lockstep.distribute(smooth(), 2), None)
    run = tmp_path / "run"
    broken = lockstep.distribute(smooth(), 2, prefetch=AHEAD)
    with pytest.raises(OSError, match="the power is gone"):
        train(broken, 3, lockstep.Checkpoint(run, steps=2))
    np.random.seed(77)
    again = lockstep.distribute(smooth(), 2, prefetch=AHEAD)
    assert_same(train(again, None, lockstep.Checkpoint(run)), whole, atol=0)


@pytest.mark.parametrize("asked", [{"prefetch": 2}, {"data_on_devices": True}])
def test_a_class_with_its_own_fit_says_that_it_does_without(asked):
    class Own(keras.Sequential):
        def fit(self, *args, **kwargs):
            return super().fit(*args, **kwargs)

    def train(made):
        made.compile("sgd", "mse")
        made.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        return weights(made)

    layers = smooth(dropout=0).layers
    start = [layer.get_weights() for layer in layers]
    right = train(Own(layers))
    for layer, values in zip(layers, start, strict=True):
        layer.set_weights(values)
    made = Own(layers)
    with pytest.raises(DataOnHostWarning):  # where warnings are errors, nothing is changed
        lockstep.distribute(made, 2, **asked)
    assert "fit" not in vars(made)
    for devices in (2, 2, 3):
        with pytest.warns(DataOnHostWarning, match="asked for, and Own has its own fit") as said:
            lockstep.distribute(made, devices, **asked)
        assert said[0].filename == __file__
    with pytest.raises(DataOnHostWarning):
        lockstep.distribute(made, 2, **asked)
    assert len(attached(made)) == 3
    assert_same(train(made), right)
    assert lockstep.verify(made, (X, Y), devices=2, steps=2).equal


@pytest.mark.parametrize("prefetch", [-1, True, 2.0, "2", None])
def test_a_number_that_is_none_is_refused(prefetch):
    made = smooth()
    with pytest.raises(UnusableData, match=r"prefetch=.* was given"):
        lockstep.distribute(made, 2, prefetch=prefetch)
    assert "fit" not in vars(made)


def test_a_number_of_numpys_is_one():
    made = lockstep.distribute(smooth(), 2, prefetch=np.int64(2))
    assert current_engine().input_options(made).prefetch == 2


def test_what_was_not_begun_is_asked_for_again():
    may_be_made = threading.Semaphore(1)

    def batches():
        for number in range(5):
            assert may_be_made.acquire(timeout=60)
            yield number

    made = of(batches())
    made.begin_epoch(3, 5)
    assert next(made) == 0
    later = threading.Timer(0.3, may_be_made.release, (4,))  # until then 1 is being made
    later.start()
    made.settle(waiting=True)
    later.join()
    made.begin_epoch(0, 5)
    assert list(made) == [1, 2, 3, 4]


def test_rows_are_gathered_again_that_were_not_given():
    rows, begun, may_end = list(range(5)), threading.Event(), threading.Event()

    def batch(number):
        if number == 2 and not begun.is_set():
            begun.set()
            assert may_end.wait(60)
        return rows[number]

    made = of_rows(iter(range(5)), batch)
    made.begin_epoch(3, 5)
    assert next(made) == 0
    assert begun.wait(60)  # 1 is there, 2 is being gathered, 3 waits
    made.settle(waiting=True)
    rows[:] = [number * 10 for number in rows]
    made.begin_epoch(2, 5)
    may_end.set()
    assert list(made) == [10, 20, 30, 40]


def test_nothing_is_drawn_before_the_first_batch_is_asked_for():
    asked = []
    made = of(asked.append(number) or number for number in range(3))
    made.begin_epoch(2, None)
    assert asked == []
    assert list(made) == [0, 1, 2]
    assert list(made) == []
