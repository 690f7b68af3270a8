"""What goes wrong in the process of a replica comes home, and leaves nothing behind."""

import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import torch
from keras import layers

import lockstep
from lockstep.engines.torch.ranks import pool
from lockstep.engines.torch.steps import steps
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel, WorkerDied
from tests.agreement import assert_equal, both, values
from tests.tiers import further

QUIET = {"verbose": 0, "shuffle": False}

pytestmark = pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")


class Fails(layers.Layer):
    """Fails in the processes of the workers, at so many calls; in that of the test it does not."""

    def __init__(self, how, calls, **kwargs):
        super().__init__(**kwargs)
        self.home = os.getpid()
        self.how = how
        self.calls = calls

    def call(self, x):
        if os.getpid() != self.home:
            self.calls -= 1
            if self.calls < 0 and self.how == "kill":
                print("the last words", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if self.calls < 0 and self.how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.calls < 0:
                raise KeyError("no such thing")
        return x * 1.0


def failing(how, calls):
    def build():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                layers.BatchNormalization(),
                layers.Dense(3),
                Fails(how, calls),
                layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return model

    return build


def data(rows=20):
    rng = np.random.default_rng(1)
    return rng.normal(size=(rows, 4)), rng.normal(size=(rows, 2))


def workers(parent):
    """The processes of replicas that a process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            started_by = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
        if started_by == parent and b"lockstep.engines.torch.ranks.worker" in command:
            found.append(int(folder.name))
    return found


def is_running(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_killed_worker_ends_the_call_and_the_model_stands_as_after_the_last_step():
    """Three steps of five rows; the workers die within the forward pass of the fourth."""
    one, many = both(failing("kill", 3), devices=2)
    x, y = data()
    one.fit(x[:15], y[:15], batch_size=5, **QUIET)
    before = set(workers(os.getpid()))
    with pytest.raises(WorkerDied, match=r"replica 1 \(cpu:1\) has ended by signal 9") as caught:
        many.fit(x, y, batch_size=5, **QUIET)
    assert "the last words" in caught.value.__notes__[0]
    del caught  # and the frames of Keras's loop
    assert_equal(values(one), values(many))
    assert set(workers(os.getpid())) <= before
    # The processes are started anew, and training goes on from there.
    many.layers[2].calls = 1000
    assert_equal(one.fit(x, y, **QUIET).history, many.fit(x, y, **QUIET).history)
    assert_equal(values(one), values(many))
    # An error of a worker comes home as itself.
    many.layers[2].calls, many.layers[2].how = 0, "raise"
    with pytest.raises(KeyError, match="no such thing") as caught:
        many.fit(x, y, batch_size=5, **QUIET)
    assert "replica 1 (cpu:1)" in caught.value.__notes__[0]
    del caught
    assert_equal(values(one), values(many))
    assert set(workers(os.getpid())) <= before
    lockstep.release(many)


def test_an_interrupt_within_a_step_leaves_what_was_before_it(monkeypatch):
    """The forward pass has moved the means of batch normalization."""
    one, many = both(failing("raise", 1000), devices=2)
    x, y = data()
    lost, left = steps._global_loss, [3]

    def interrupted(*given):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return lost(*given)

    monkeypatch.setattr(steps, "_global_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        many.fit(x, y, batch_size=5, **QUIET)
    done = 5 * int(many.optimizer.iterations)
    assert 0 < done < 20
    one.fit(x[:done], y[:done], batch_size=5, **QUIET)
    assert_equal(values(one), values(many))
    assert_equal(one.fit(x, y, **QUIET).history, many.fit(x, y, **QUIET).history)
    lockstep.release(many)


@pytest.mark.thorough
def test_the_worker_that_was_killed_between_two_steps_is_named():
    """The other one ends too, by the connection to it."""
    before = set(workers(os.getpid()))
    _, many = both(failing("raise", 1000), devices=["cpu:0", "cpu:1", "cpu:3"])
    x, y = data()
    killed = []

    def kill(batch, logs):
        if batch == 1:
            killed.append(max(set(workers(os.getpid())) - before))
            os.kill(killed[0], signal.SIGKILL)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=kill)
    with pytest.raises(WorkerDied) as caught:
        many.fit(x, y, batch_size=5, callbacks=[callback], **QUIET)
    named = f"replica 2 (cpu:3) has ended by signal 9; it was process {killed[0]}"
    assert named in str(caught.value)


@pytest.mark.whole
def test_the_end_of_a_worker_between_two_calls_is_noticed_at_the_next_one():
    _, many = both(failing("raise", 1000), devices=2)
    x, _ = data()
    before = set(workers(os.getpid()))
    outputs = many.predict(x, verbose=0)
    (worker,) = set(workers(os.getpid())) - before
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="signal 9"):
        many.predict(x, verbose=0)
    assert_equal(outputs, many.predict(x, verbose=0))
    lockstep.release(many)


@pytest.fixture
def short_patience(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_PATIENCE", "2")


@pytest.mark.thorough
def test_a_stopped_worker_is_reported_and_the_model_stands_as_after_the_last_step(short_patience):
    one, many = both(failing("stop", 3), devices=2)
    x, y = data()
    one.fit(x[:15], y[:15], batch_size=5, **QUIET)
    before = set(workers(os.getpid()))
    with pytest.raises(
        WorkerDied, match=r"replica 1 .* was suspended by a signal for 2 seconds"
    ) as caught:
        many.fit(x, y, batch_size=5, **QUIET)
    del caught
    assert_equal(values(one), values(many))
    assert set(workers(os.getpid())) <= before
    lockstep.release(many)


@pytest.mark.thorough
def test_a_worker_that_is_stopped_between_two_calls_is_reported(short_patience):
    _, many = both(failing("raise", 1000), devices=2)
    x, _ = data()
    before = set(workers(os.getpid()))
    outputs = many.predict(x, verbose=0)
    (worker,) = set(workers(os.getpid())) - before
    os.kill(worker, signal.SIGSTOP)
    with pytest.raises(WorkerDied, match="was suspended by a signal for 2 seconds"):
        many.predict(x, verbose=0)
    assert_equal(outputs, many.predict(x, verbose=0))
    lockstep.release(many)


@pytest.mark.thorough
def test_a_worker_that_goes_on_in_time_is_waited_for(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_PATIENCE", "30")
    one, many = both(failing("raise", 1000), devices=2)
    x, _ = data()
    before = set(workers(os.getpid()))
    many.predict(x, verbose=0)
    (worker,) = set(workers(os.getpid())) - before
    os.kill(worker, signal.SIGSTOP)
    timer = threading.Timer(2.5, os.kill, (worker, signal.SIGCONT))
    timer.start()
    assert_equal(one.predict(x, verbose=0), many.predict(x, verbose=0))
    timer.join()
    lockstep.release(many)


class DiesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, home):
        ctx.home = home
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if os.getpid() != ctx.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return gradient, None


@lockstep.rowwise  # a function of PyTorch with a gradient would run on the first device alone
class FailsInBackward(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.home = os.getpid()

    def call(self, x):
        return DiesInBackward.apply(x, self.home)


class DiesInTransfer:
    """An attribute of a model that ends the process that unpickles it."""

    def __init__(self):
        self.home = os.getpid()

    def __setstate__(self, state):
        vars(self).update(state)
        if os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)


class DiesInUpdate(keras.optimizers.SGD):
    """Ends the process of a worker in the first update."""

    home = 0

    def update_step(self, gradient, variable, learning_rate):
        if self.home not in (0, os.getpid()):
            os.kill(os.getpid(), signal.SIGKILL)
        super().update_step(gradient, variable, learning_rate)


def in_backward(model):
    made = keras.Sequential(
        [keras.Input((4,)), layers.Dense(3), FailsInBackward(), layers.Dense(2)]
    )
    made.compile("sgd", "mse")
    return made


def in_transfer(model):
    model.attribute = DiesInTransfer()
    return model


def in_update(model):
    optimizer = DiesInUpdate(0.1)
    model.compile(optimizer, "mse")
    optimizer.home = os.getpid()
    return model


def in_evaluation(model):
    model.layers[2].how, model.layers[2].calls = "kill", 0
    return model


@pytest.mark.parametrize("phase", [in_backward, *further(in_transfer, in_update, in_evaluation)])
def test_a_worker_that_dies_in_any_phase_ends_the_call(phase, shared_memory):
    model = phase(failing("raise", 1000)())
    lockstep.distribute(model, 2)
    x, y = data()
    before, there = values(model), set(workers(os.getpid()))
    run = model.fit if phase is not in_evaluation else model.evaluate
    with pytest.raises(WorkerDied, match=r"replica 1 \(cpu:1\) has ended by signal 9"):
        run(x, y, batch_size=5, verbose=0)
    if phase is in_update:  # rank 0 has made the step that its worker has not
        assert int(model.optimizer.iterations.value) == 1
    elif phase is not in_evaluation:  # whose metrics were reset
        weights = model.get_weights()
        assert_equal(before[: len(weights)], weights)
    assert set(workers(os.getpid())) <= there
    lockstep.release(model)


def test_a_worker_that_dies_as_it_starts_ends_the_call(monkeypatch, shared_memory):
    monkeypatch.setattr(pool, "_START", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    _, many = both(failing("raise", 1000), devices=4)  # no other model has these
    before = set(workers(os.getpid()))
    with pytest.raises(WorkerDied, match="has ended by signal 9"):
        many.predict(data()[0], verbose=0)
    assert set(workers(os.getpid())) <= before
    lockstep.release(many)


@pytest.mark.whole
def test_fifty_fits_leave_no_handle_behind(shared_memory):
    def handles():
        gc.collect()
        files, threads = Path("/proc/self/fd"), Path("/proc/self/task")
        counts = [len(list(folder.iterdir())) for folder in (files, threads)]
        return [*counts, len(workers(os.getpid()))]

    model = failing("raise", 10_000)()
    lockstep.distribute(model, 2)
    x, y = data()
    after = []
    for number in range(50):
        model.fit(x, y, batch_size=10, **QUIET)
        if number in (5, 49):
            after.append(handles())
    assert after[0] == after[1]
    lockstep.release(model)


def trained(devices=2):
    """The processes of the workers of a model that has been trained and has ended."""
    before = set(workers(os.getpid()))
    model = lockstep.distribute(failing("raise", 10_000)(), devices)
    model.fit(*data(), **QUIET)
    found = set(workers(os.getpid()))
    lockstep.release(model)
    return found, found - before


def test_the_workers_of_one_model_are_those_of_the_next_and_end_without_one(monkeypatch, tmp_path):
    found, _ = trained()
    assert trained() == (found, set())
    monkeypatch.syspath_prepend(tmp_path)  # new workers could import from there
    again, new = trained()
    assert len(new) == 1
    assert len(again) == len(found)
    monkeypatch.setattr(pool, "_IDLE", 0.0)
    deadline = time.monotonic() + 60
    while new & set(workers(os.getpid())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not new & set(workers(os.getpid()))


def test_workers_start_while_the_script_builds_its_model_and_reads_its_data(monkeypatch, tmp_path):
    monkeypatch.setattr(pool, "_pools", {})
    before = set(workers(os.getpid()))
    model = lockstep.distribute(failing("raise", 10_000)(), 2)
    early = set(workers(os.getpid())) - before
    assert len(early) == 1
    model.fit(*data(), **QUIET)
    assert set(workers(os.getpid())) - before == early
    lockstep.release(model)

    monkeypatch.setattr(pool, "_pools", {})
    model = lockstep.distribute(failing("raise", 10_000)(), 2)
    outdated = set(workers(os.getpid())) - before - early
    monkeypatch.setenv("A_VARIABLE", "that the workers would not have")
    model.fit(*data(), **QUIET)
    assert not outdated & set(workers(os.getpid()))
    lockstep.release(model)


def test_workers_that_no_step_needed_end_with_their_model(monkeypatch):
    monkeypatch.setattr(pool, "_pools", {})
    before = set(workers(os.getpid()))
    model = lockstep.distribute(failing("raise", 10_000)(), 2)
    (early,) = set(workers(os.getpid())) - before
    monkeypatch.setattr(pool, "_IDLE", 0.0)
    time.sleep(2.5)  # more than the watch waits between two looks
    assert is_running(early), "the model may still train"
    lockstep.release(model)
    deadline = time.monotonic() + 60
    while is_running(early) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(early)


def test_a_file_that_is_written_while_workers_start_does_not_end_them(monkeypatch):
    monkeypatch.setattr(pool.Pool, "_is_outdated", lambda self: True)
    _, new = trained()
    assert len(new) == 1


SCRIPT = """
import os, sys
import keras, lockstep, numpy as np
from keras import layers

class Scaled(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.scale

def loss(y, y_pred):
    return keras.ops.sum(keras.ops.square(y - y_pred))

rng = np.random.default_rng(1)
x, y = rng.normal(size=(9, 4)), rng.normal(size=(9, 2))
for devices in (1, 2):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), Scaled(), layers.Dense(2)])
    model.compile("sgd", loss)
    lockstep.distribute(model, devices)
    print(*model.fit(x, y, batch_size=4, verbose=0, shuffle=False).history["loss"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _end_threads_of_keras():
    """Keras ends the thread of its callbacks when the list of callbacks is collected."""
    yield
    gc.collect()


@pytest.fixture
def shared_memory():
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before


def test_workers_end_with_a_killed_parent_and_nothing_is_left(tmp_path, shared_memory):
    """A script without a main guard, whose layer and loss travel by value."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LOCKSTEP_REHEARSE": "2"},
    ) as process:
        one, two = (float(process.stdout.readline()) for _ in range(2))
        (worker,) = workers(process.pid)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while is_running(worker) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not is_running(worker)
    assert two == pytest.approx(one, rel=1e-6)


def test_a_class_that_cannot_be_pickled_is_named():
    kept = functools.cmp_to_key(len)(1.0)

    class Locked(keras.Sequential):
        def locked(self):
            return kept.obj

    _, many = both(lambda: Locked([keras.Input((4,)), layers.Dense(2)]), devices=3)
    x, _ = data()
    with pytest.raises(UnsupportedModel, match="its devices: Locked, the class of 'locked"):
        many.predict(x, verbose=0)


class Counts(layers.Layer):
    calls = 0

    def call(self, x):
        self.calls += 1
        return x * 1.0


def test_layers_that_run_whole_are_named():
    _, many = both(lambda: keras.Sequential([keras.Input((4,)), Counts()]), devices=3)
    x, _ = data()
    with pytest.warns(UnsplitBatchWarning, match=r"every device runs 'counts.*' \(a call changes"):
        many.predict(x, verbose=0)
