"""The loop of `fit`, `evaluate` and `predict` is Keras's in all but its cost."""

import gc
import random
import signal
import threading
import warnings
from dataclasses import replace

import jax
import keras
import numpy as np
import pytest

import lockstep
from lockstep.engines.jax.steps.programs import Programs
from lockstep.errors import UnusableData
from lockstep.training.input import HostIterator
from tests.conformance import common
from tests.conformance.common import assert_same, weights
from tests.conformance.side_by_side import (
    BATCH,
    assert_same_runs,
    both,
    held_out,
    smooth,
    train,
)
from tests.conformance.test_callback_hooks import HOOKS, everything


class Notes(keras.callbacks.Callback):
    """Keeps every call it gets, with the logs as they are handed over."""

    def __init__(self, calls=None):
        super().__init__()
        self.calls = [] if calls is None else calls


def _note(name):
    if "batch" in name or "epoch" in name:
        return lambda self, number, logs=None: self.calls.append((self, name, number, logs))
    return lambda self, logs=None: self.calls.append((self, name, None, logs))


for _name in HOOKS:
    setattr(Notes, _name, _note(_name))


def run_all(made, callbacks, **kwargs):
    x, y = held_out()
    train(made, callbacks, **kwargs)
    made.evaluate(x, y, batch_size=5, verbose=0, callbacks=callbacks)
    made.predict(x, batch_size=5, verbose=0, callbacks=callbacks)


@pytest.mark.parametrize("devices", [1, 4])
def test_order_of_calls_and_logs_are_those_of_keras(devices, tmp_path):
    def script(made, folder):
        calls = []
        both_notes = [Notes(calls), Notes(calls)]
        run_all(made, both_notes)
        # Looked at long after the steps that they are from.
        return [
            (both_notes.index(who), name, number, list(logs or {}), dict(logs or {}))
            for who, name, number, logs in calls
        ]

    one, many = both(script, tmp_path, devices)
    assert [call[:4] for call in many.returned] == [call[:4] for call in one.returned]
    for mine, theirs in zip(many.returned, one.returned, strict=True):
        assert_same(mine[4], theirs[4], atol=0 if devices == 1 else 1e-5)
        for a, b in zip(mine[4].values(), theirs[4].values(), strict=True):
            assert type(a) is type(b)


def test_nothing_is_fetched_for_callbacks_that_look_at_no_value(monkeypatch):
    from lockstep.training.logs import LazyLogs

    made = lockstep.distribute(smooth(), devices=1)
    notes = Notes()
    train(made, [notes], validation_data=None)
    logs = [logs for _, name, _, logs in notes.calls if name == "on_train_batch_end"]
    assert len(logs) == 14
    assert all(isinstance(each, LazyLogs) and each._numbers is not None for each in logs)


@pytest.fixture
def waits(monkeypatch):
    """Counts how often the host waits for a device, for numbers or for a step to be done."""
    counted = []

    def counting(original):
        def wait(*args):
            counted.append(original)
            return original(*args)

        return wait

    array = type(jax.numpy.ones(1))
    numbers = vars(array)["_value"]  # jax/_src/array.py, ArrayImpl: what every way to them reads
    monkeypatch.setattr(array, "_value", property(counting(numbers.fget)))
    monkeypatch.setattr(array, "block_until_ready", counting(array.block_until_ready))
    monkeypatch.setattr(jax, "block_until_ready", counting(jax.block_until_ready))
    return counted


@pytest.mark.parametrize("devices", [2, 4])  # NumPy reads an array of one CPU device by itself
def test_no_step_waits_for_a_device(devices, waits, tmp_path):
    made = lockstep.distribute(smooth(), devices)

    def count(rows, callbacks=()):
        x, y = common.data(rows)
        stock = [
            keras.callbacks.EarlyStopping("loss", patience=99),
            keras.callbacks.ReduceLROnPlateau("loss", patience=99),
            keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"),
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        ]
        waits.clear()
        made.fit(x, y, batch_size=BATCH, verbose=2, callbacks=[*stock, *callbacks])
        made.evaluate(x, y, batch_size=BATCH, verbose=0)
        made.predict(x[: 2 * BATCH], batch_size=BATCH, verbose=0)
        return len(waits)

    count(10 * BATCH)  # compiles
    assert count(60 * BATCH) == count(10 * BATCH)
    assert count(60 * BATCH, [keras.callbacks.TerminateOnNaN()]) >= 60  # who looks, waits


class Total(keras.metrics.Metric):
    """Gives out the value of its variable itself."""

    def __init__(self):
        super().__init__(name="total")
        self.total = self.add_weight(initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(y_pred))

    def result(self):
        return self.total.value


def test_a_metric_that_returns_its_own_variable_can_be_looked_at_later(tmp_path):
    """The next step gives the variable's array away."""

    def script(made, folder):
        made.compile(made.optimizer, "mse", metrics=[Total()])
        notes = Notes()
        train(made, [notes])
        return [dict(logs or {}) for _, _, _, logs in notes.calls]

    assert_same_runs(*both(script, tmp_path, devices=1))


@pytest.mark.parametrize("devices", [1, 4])
def test_variables_are_looked_at_once_an_epoch(devices, monkeypatch):
    counted = []
    settled = Programs.settled

    def counting(self, *args):
        counted.append(1)
        return settled(self, *args)

    monkeypatch.setattr(Programs, "settled", counting)
    made = lockstep.distribute(smooth(), devices)
    train(made, [Notes()], epochs=3, validation_data=None)
    assert len(counted) == 3
    x, y = held_out()
    made.evaluate(x, y, batch_size=5, verbose=0)
    assert len(counted) == 4


def test_the_progress_bar_shows_the_numbers_of_the_step_it_names(monkeypatch, capsys):
    """Drawn at every step and at few steps alike."""
    shown = []
    defaults = list(keras.utils.Progbar.__init__.__defaults__)
    assert defaults[2] == 0.05  # the interval; a bar without one draws at each step
    defaults[2] = -1.0
    monkeypatch.setattr(keras.utils.Progbar.__init__, "__defaults__", tuple(defaults))
    for distributed in (False, True):
        made = smooth()
        if distributed:
            lockstep.distribute(made, devices=1)
            capsys.readouterr()
        # Beside a callback for batches, Keras alone draws in the thread of the caller too.
        train(made, [Notes()], verbose=1, validation_data=None)
        lines = capsys.readouterr().out.split("\r")
        shown.append([(line.split("/")[0][-2:], line.split(" - ")[1:]) for line in lines])
    mine = [line for line in shown[1] if line[1]]
    theirs = [line for line in shown[0] if line[1]]
    assert len(theirs) == 16
    assert [_without_times(line) for line in mine] == [_without_times(line) for line in theirs]


def _without_times(line):
    number, parts = line
    return number, [" ".join(part.strip("\b").split()) for part in parts if ":" in part]


def test_between_two_drawings_the_bar_still_counts(capsys):
    def run(made):
        bar = keras.callbacks.ProgbarLogger()
        data = ((common.data(BATCH)) for _ in range(5))
        with warnings.catch_warnings(record=True, action="always") as said:
            made.fit(data, shuffle=False, callbacks=[bar])
        assert "5/5" in capsys.readouterr().out
        return bar.seen, bar.target, [str(warning.message) for warning in said]

    assert run(lockstep.distribute(smooth(), devices=1)) == run(smooth())


# ------------------------------------------------------------------- stops and errors


@pytest.mark.parametrize("devices", [1, 3])
def test_an_interrupt_at_any_moment_leaves_the_weights_of_some_step(devices):
    x, y = common.data(40 * BATCH)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    made = lockstep.distribute(smooth(dropout=0.0), devices)
    made.fit(x[:BATCH], y[:BATCH], **options)
    start = everything(made)

    def back():
        for variable, value in zip(_variables(made), start_values, strict=True):
            variable.assign(value)

    start_values = [np.asarray(v.value) for v in _variables(made)]
    assert start
    right = [weights(made)]
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (made.jax_state_sync(), right.append(weights(made)))
    )
    made.fit(x, y, callbacks=[keep], **options)
    assert len(right) == 41

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    chance = random.Random(3)
    stopped = 0
    gc.disable()  # Python drops what is raised within JAX's callback of its garbage collector
    try:
        for _ in range(60):
            back()
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, 0.03))
                made.fit(x, y, **options)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                stopped += 1
            found = weights(made)
            assert any(
                all(np.array_equal(a, b) for a, b in zip(found, each, strict=True))
                for each in right
            )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert stopped


def _variables(made):
    return [*made.variables, *made.optimizer.variables]


@pytest.mark.parametrize("devices", [None, 1, 4])
def test_an_error_of_the_data_comes_through_and_keeps_the_weights(devices):
    """Also in the first batch of an epoch, after a callback has assigned weights."""
    made = smooth()
    if devices:
        lockstep.distribute(made, devices)

    class Two(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            source.fail = epoch == 1
            self.model.layers[0].bias.assign(np.full(6, epoch + 2.0, "float32"))

    class Data(keras.utils.PyDataset):
        fail = False

        def __len__(self):
            return 2

        def __getitem__(self, index):
            if self.fail:
                raise OSError("the disk is gone")
            return common.data(BATCH)

    source = Data()
    with pytest.raises(OSError, match="the disk is gone") as raised:
        made.fit(source, epochs=2, callbacks=[Two()], verbose=0, shuffle=False)
    assert any(entry.name == "__getitem__" for entry in raised.traceback)
    if devices:  # Keras alone goes back to the bias of the epoch before
        np.testing.assert_array_equal(made.layers[0].bias, np.full(6, 3.0, "float32"))
    train(made, epochs=1)
    del raised
    gc.collect()  # Keras's own list of callbacks has a thread, which ends with it


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_an_error_in_evaluate_or_predict_leaves_the_weights(call):
    class Raises(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

        on_predict_batch_end = on_test_batch_end

    made = lockstep.distribute(smooth(), 3)
    before = weights(made)
    x, y = held_out()
    data = {"x": x, "y": y} if call == "evaluate" else {"x": x}
    with pytest.raises(KeyboardInterrupt):
        getattr(made, call)(**data, batch_size=5, verbose=0, callbacks=[Raises()])
    assert_same(weights(made), before, atol=0)
    train(made, epochs=1)


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("hook", ["begin", "end"])
def test_a_callback_may_raise_what_means_the_end_of_the_data(call, hook):
    """`StopIteration` ended the call with Keras's warning that data have run out."""

    class Raises(keras.callbacks.Callback):
        pass

    def raises(self, batch, logs=None):
        raise StopIteration("of the callback")

    kind = {"fit": "train", "evaluate": "test", "predict": "predict"}[call]
    setattr(Raises, f"on_{kind}_batch_{hook}", raises)
    made = lockstep.distribute(smooth(), 2)
    x, y = held_out()
    data = {"x": x} if call == "predict" else {"x": x, "y": y}
    with pytest.raises(StopIteration, match="of the callback"):
        getattr(made, call)(**data, batch_size=5, verbose=0, callbacks=[Raises()])
    train(made, epochs=1)


def test_callbacks_run_in_the_thread_of_the_caller():
    threads = set()

    class Where(keras.callbacks.Callback):
        async_safe = True

        def on_train_batch_end(self, batch, logs=None):
            threads.add(threading.current_thread())

    train(lockstep.distribute(smooth(), 2), [Where()])
    assert threads == {threading.current_thread()}


# -------------------------------------------------------------------- within each other


def test_fit_within_fit(tmp_path):
    x, y = held_out()

    class Inner(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.fit(x, y, batch_size=5, shuffle=False, verbose=0)

    class InnerInBatch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                self.model.predict(x, batch_size=5, verbose=0)

    assert_same_runs(
        *both(lambda made, _: train(made, [Inner(), InnerInBatch()]), tmp_path, devices=3)
    )


@pytest.mark.parametrize("call", ["evaluate", "predict", "train_on_batch", "fit"])
@pytest.mark.whole
def test_a_callback_that_uses_the_model_it_was_made_with(call, tmp_path):
    """In the middle of an epoch; Keras alone has to be asked for `self.model`, and fails here."""
    x, y = held_out()
    others = {"x": x} if call == "predict" else {"x": x, "y": y}
    others |= {} if "batch" in call else {"batch_size": 5, "verbose": 0}

    def script(made, folder):
        kept = []

        class Uses(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 2:
                    found = getattr(made if lockstep_attached(made) else self.model, call)(**others)
                    kept.append(found.history if call == "fit" else found)

        return train(made, [Uses()]), kept

    assert_same_runs(*both(script, tmp_path, devices=3))


@pytest.mark.parametrize(("devices", "times"), [(1, 1), (3, 1), (3, 3)])
def test_compiled_anew_by_a_callback(devices, times, tmp_path):
    """The first step after it builds the new metrics, and returns a larger state."""

    class Compile(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                made = self.model
                optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
                made.compile(optimizer, "mae", metrics=["mse"], steps_per_execution=times)
                made.optimizer.build(made.trainable_variables)
                made.make_train_function()
                made.make_test_function()

    def script(made, _):
        made.steps_per_execution = times
        return train(made, [Compile()], epochs=3)

    one, many = both(script, tmp_path, devices)
    assert len(many.returned["mse"]) == 2
    assert_same_runs(one, many)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_step_function_that_somebody_has_put_around_is_called(devices, tmp_path):
    def script(made, _):
        made.make_train_function()
        step, calls = made.train_function, []

        def around(state, iterator):
            calls.append(None)
            return step(state, iterator)

        made.train_function = around
        return train(made), len(calls)

    assert_same_runs(*both(script, tmp_path, devices))


def lockstep_attached(made):
    return "_lockstep" in vars(made)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # of stock Keras too
def test_the_data_may_end_within_a_step_function_that_somebody_has_put_around():
    """The end was taken for that of what keeps the state, and every weight was lost."""
    x, y = common.data(3 * BATCH)
    found = []
    for devices in (None, 2):
        made = smooth()
        if devices:
            lockstep.distribute(made, devices)
        made.make_train_function()
        plain = made.train_function
        made.train_function = lambda state, iterator, plain=plain: plain(state, iterator)
        rows = (part for part in zip(np.split(x, 3), np.split(y, 3), strict=True))
        found.append((made.fit(rows, shuffle=False, verbose=0).history, weights(made)))
    assert_same(*found)


def test_moving_a_model_says_its_line_once(capsys):
    made = smooth()
    for devices in (2, 4, 1):
        lockstep.distribute(made, devices)
    train(made, verbose=2)
    assert capsys.readouterr().out.count("lockstep: jax") == 1


# ------------------------------------------------------------------------- the class


def test_methods_of_the_class_are_its_own():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)
            self.called = []

        def call(self, x):
            return self.dense(x)

        def evaluate(self, *args, **kwargs):
            self.called.append("evaluate")
            return super().evaluate(*args, **kwargs)

        def predict(self, *args, **kwargs):
            self.called.append("predict")
            return super().predict(*args, **kwargs)

    histories = []
    for devices in (None, 4):
        keras.utils.set_random_seed(3)
        made = Own()
        made.compile("sgd", "mse", metrics=["mae"])
        if devices:
            lockstep.distribute(made, devices)
        run_all(made, [])
        assert list(made.called) == ["evaluate", "evaluate", "evaluate", "predict"]
        histories.append([made.history.history, weights(made)])
    assert_same(histories[1], histories[0])


# --------------------------------------------------------------------------- the data


@pytest.mark.parametrize("devices", [1, 4])
def test_a_source_that_writes_each_batch_into_one_buffer(devices):
    """The step runs while Python goes on, and JAX may read a host array in place."""
    x, y = common.data(40 * BATCH)

    class Batches(keras.utils.PyDataset):
        def __init__(self, reuse):
            super().__init__()
            self.reuse = reuse
            self.inputs = np.empty((BATCH, 4), "float32")
            self.targets = np.empty((BATCH, 2), "float32")

        def __len__(self):
            return 40

        def __getitem__(self, index):
            rows = slice(index * BATCH, (index + 1) * BATCH)
            if not self.reuse:
                return x[rows], y[rows]
            self.inputs[:], self.targets[:] = x[rows], y[rows]
            return self.inputs, self.targets

    found = []
    for reuse in (False, True):
        made = lockstep.distribute(smooth(), devices)
        made.fit(Batches(reuse), shuffle=False, verbose=0)
        found.append(everything(made))
    assert_same(found[1], found[0], atol=0)


def test_what_a_source_may_write_into_is_copied(tmp_path):
    """Memory, or the pages of a file."""
    plain = np.zeros((BATCH, 4), "float32")
    mapped = np.memmap(tmp_path / "rows", "float32", "w+", shape=(BATCH, 4))
    batches = HostIterator(x=((plain, mapped) for _ in range(2)))
    for _, _, iterator in batches:
        given = next(iterator)
        assert [part.shape for part in given] == [(BATCH, 4)] * 2
        assert not any(map(np.shares_memory, given, (plain, mapped)))
        return
    raise AssertionError("no batch")


@pytest.mark.parametrize("shuffle", [True, "batch", False])
def test_rows_come_in_the_order_of_keras(shuffle, tmp_path):
    def script(made, folder):
        np.random.seed(4)
        return train(made, shuffle=shuffle), np.random.random()

    one, many = both(script, tmp_path, devices=1)
    assert_same(many.returned, one.returned, atol=0)
    assert_same(weights(many.model), weights(one.model), atol=0)


@pytest.mark.parametrize("stop", [False, True])
def test_a_generator_loses_no_more_rows_than_with_keras(stop):
    taken = []
    for devices in (None, 1, 3):
        made = smooth()
        if devices:
            lockstep.distribute(made, devices)
        counted = []

        def endless(counted=counted):
            while True:
                counted.append(1)
                yield common.data(BATCH)

        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.stop_training = stop and batch == 3

        source = endless()
        for _ in range(2):
            made.fit(
                source, steps_per_epoch=5, epochs=2, verbose=0, shuffle=False, callbacks=[Stop()]
            )
            counted.append("fit")
        taken.append(counted)
    assert taken[1] == taken[0]
    assert taken[2] == taken[0]


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_an_epoch_without_a_batch_has_the_logs_of_the_one_before(tmp_path):
    """A generator that ends where an epoch does: Keras asks for more, and goes on."""

    def script(made, folder):
        notes = Notes()
        batches = (common.data(BATCH, seed=seed) for seed in range(10))
        options = {"steps_per_epoch": 5, "epochs": 4, "verbose": 0, "shuffle": False}
        history = made.fit(batches, **options, callbacks=[notes])
        logs = [list((logs or {}).values()) for _, _, _, logs in notes.calls]
        return history.epoch, history.history, [call[1:3] for call in notes.calls], logs

    one, many = both(script, tmp_path, devices=3)
    losses = many.returned[1]["loss"]
    assert losses[2] == losses[1]
    assert len(losses) == 4
    assert many.returned[0] == one.returned[0]
    assert many.returned[2] == one.returned[2]
    assert_same(many.returned[1], one.returned[1])
    assert_same(many.returned[3], one.returned[3])
    assert_same(weights(many.model), weights(one.model))


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_data_without_a_batch_are_refused_in_words(call):
    """Keras alone names a local variable of its own, and forgets the weights in `evaluate`."""
    import tensorflow as tf

    made = lockstep.distribute(smooth(), 3)
    train(made, epochs=1)
    before = weights(made)
    named, options = (call, {}) if call != "fit" else ("fit, in epoch 1,", {"shuffle": False})
    nothing = tf.data.Dataset.from_tensor_slices(held_out()).batch(7).filter(lambda *_: False)
    with pytest.raises(UnusableData, match=f"^{named} was given 0 batches, but at least 1 is"):
        getattr(made, call)(nothing, verbose=0, **options)
    assert_same(weights(made), before, atol=0)


@pytest.mark.parametrize("devices", [1, 4])
def test_batches_go_from_the_host_straight_to_their_devices_and_stay_narrow(devices, monkeypatch):
    """No device is in between, and a byte stays a byte until it is in the program."""
    host, taken = [], []
    shard = Programs._shard

    def watching(self, batch):
        host.extend(type(leaf) for leaf in batch)
        return shard(self, batch)

    monkeypatch.setattr(Programs, "_shard", watching)
    made = keras.Sequential([keras.Input((4,), dtype="uint8"), keras.layers.Rescaling(1 / 255)])
    made.add(keras.layers.Dense(2))
    made.compile("sgd", "mse")
    lockstep.distribute(made, devices)
    made.make_train_function()
    function = made.train_function

    def noting(program, state, batch):
        taken.append(batch)
        return (
            batch
            if function.check_program is None
            else function.check_program(program, state, batch)
        )

    made.train_function = replace(function, check_program=noting)
    x = np.arange(8 * 4, dtype="uint8").reshape(8, 4)
    made.fit(x, np.ones((8, 2), "float32"), batch_size=8, shuffle=False, verbose=0)
    ((inputs, _),) = taken
    assert host == [np.ndarray, np.ndarray]
    if devices == 1:
        assert type(inputs) is np.ndarray
        assert inputs.dtype == "uint8"
    else:
        assert inputs.padded.dtype == "uint8"
        shards = inputs.padded.addressable_shards
        assert [shard.data.shape for shard in shards] == [(2, 4)] * 4
        assert len({shard.device for shard in shards}) == 4


def test_a_callback_may_write_into_the_rows_of_the_next_batch():
    """However large they are: no batch is cut out before its turn."""

    def history(devices):
        keras.utils.set_random_seed(3)
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(20, 2**16)).astype("float32"), np.zeros((20, 1), "float32")

        class Writes(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                y[(batch + 1) * 4 : (batch + 2) * 4] = batch + 1

        model = keras.Sequential([keras.Input((2**16,)), keras.layers.Dense(1)])
        if devices:
            lockstep.distribute(model, devices)
        model.compile(keras.optimizers.SGD(1e-7), "mse")
        return model.fit(x, y, 4, shuffle=False, verbose=0, callbacks=[Writes()]).history

    assert_same(history(2), history(None))
