"""What the clock of a `fit` counts to which part; the time is that of the test."""

from itertools import islice

import numpy as np
import pytest

from lockstep.core.engine import NO_BATCH, TEST, TRAIN
from lockstep.training import fit_clock
from lockstep.training.fit_clock import LOOP, OTHER, VALIDATION, FitClock
from lockstep.training.input import HostIterator

DRAW, STEP, COMPILE = 1.0, 4.0, 30.0


class Time:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    made = Time()
    monkeypatch.setattr(fit_clock, "now", made)
    return made


class Session:
    """Stands for a session; it compiles before the first step, and for each form if asked."""

    model = None

    def __init__(self, compiled=True):
        self.compiled = compiled

    def first_work(self, kind, steps):
        return "compiling the step" if self.compiled and not steps else None

    devices = ("cpu:0",)

    def is_compiled(self):
        return self.compiled

    def sync(self):
        raise AssertionError("the outputs have a value")


class Devices:
    """Runs steps of a fake time, while the host continues: only a wait sees it."""

    def __init__(self, time, monkeypatch, asynchronous):
        self.time, self.asynchronous = time, asynchronous
        self.busy_until, self.forms, self.waits = 0.0, set(), 0
        monkeypatch.setattr(fit_clock, "_wait", self.wait)

    def execute(self, iterator, times):
        for batch in [next(iterator), *islice(iterator, times - 1)]:
            if batch[0].shape not in self.forms:
                self.forms.add(batch[0].shape)
                self.time.now += COMPILE
            self.busy_until = max(self.busy_until, self.time.now) + STEP
        if not self.asynchronous:
            self.time.now = self.busy_until
        return {"loss": np.float32(1.0)}

    def wait(self, session, outputs):
        self.waits += outputs is not None
        self.time.now = max(self.time.now, self.busy_until)


def batches(time, rows, draw=DRAW, batch_size=2, **options):
    made = HostIterator(x=np.zeros((rows, 3)), y=np.zeros(rows), batch_size=batch_size, **options)
    plain = made._batches

    def slow():
        for batch in plain():
            time.now += draw
            yield batch

    made._batches = slow
    return made


def run(clock, devices, source, epochs=1, session=None, kind=TRAIN):
    for _ in range(epochs):
        with clock.steps(session or Session(), kind, source, devices.execute) as (each, execute):
            for first, last, iterator in each:
                assert execute(iterator, last - first + 1) is not NO_BATCH


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_that_run_behind_python_are_told_from_the_wait_for_data(
    asynchronous, time, monkeypatch
):
    clock, devices = FitClock(), Devices(time, monkeypatch, asynchronous)
    run(clock, devices, batches(time, rows=2 * 20), epochs=2)
    wall, split = clock.stop(), clock.split()
    assert clock.ran["train"].steps == clock.ran["train"].executions == 40
    assert split.step == STEP
    assert split.compile == COMPILE
    assert split.steps == 40 * STEP
    waited = wall - 40 * STEP - COMPILE
    assert split.input == waited
    if asynchronous:
        assert DRAW < waited < 20 * DRAW, "batches are drawn while the devices run"
        assert devices.waits < 20
    else:
        assert waited == 40 * DRAW
    assert clock.parts[LOOP] == wall


def test_the_wait_for_data_is_never_longer_than_drawing_them(time, monkeypatch):
    clock, devices = FitClock(), Devices(time, monkeypatch, asynchronous=False)
    source = batches(time, rows=2 * 20)
    with clock.steps(Session(), TRAIN, source, devices.execute) as (each, execute):
        for _, _, iterator in each:
            execute(iterator, 1)
            time.now += 7.0  # of nobody
    split, loop = clock.split(), clock.parts[LOOP]
    assert split.input == 20 * DRAW
    assert loop - split.input - split.steps - split.compile == 20 * 7.0


def test_samples_become_rarer_up_to_every_250th_execution(time, monkeypatch):
    clock, devices = FitClock(), Devices(time, monkeypatch, asynchronous=True)
    run(clock, devices, batches(time, rows=2 * 530, draw=0.0), epochs=2)
    # 3, 5, 8, 13, 20, 31, 47, 71, 107, 161, 242, 364, 547, 797, 1047
    assert len(clock.ran["train"].samples) == 15
    # Before and after each, after the first step, and at the end of the epochs.
    assert devices.waits == 2 * 15 + 1 + 2


def test_a_sample_that_something_else_made_long_does_not_count(time, monkeypatch):
    clock, devices = FitClock(), Devices(time, monkeypatch, asynchronous=True)
    execute, count = devices.execute, iter(range(99))

    def disturbed(iterator, times):
        if next(count) == 4:  # the second sample
            time.now += 1000.0
        return execute(iterator, times)

    devices.execute = disturbed
    run(clock, devices, batches(time, rows=2 * 20))
    assert clock.split().step == STEP


def test_a_batch_of_another_shape_is_compiled_once_more_and_no_sample(time, monkeypatch):
    clock, devices = FitClock(), Devices(time, monkeypatch, asynchronous=False)
    run(clock, devices, batches(time, rows=5), epochs=9)  # the third of three batches is smaller
    split = clock.split()
    assert clock.ran["train"].firsts == 2
    assert split.compile == 2 * COMPILE
    assert split.step == STEP
    assert split.steps == 27 * STEP


def test_several_steps_of_an_execution_count_each(time, monkeypatch):
    clock, devices = FitClock(), Devices(time, monkeypatch, asynchronous=False)
    source = batches(time, rows=2 * 42)
    source.run_at_once(20)
    run(clock, devices, source, epochs=5)
    split, ran = clock.split(), clock.ran["train"]
    assert (ran.executions, ran.steps) == (15, 5 * 42)
    assert split.step == STEP
    assert split.steps == 5 * 42 * STEP
    assert split.compile == COMPILE


def test_what_is_not_compiled_has_no_compilation(time, monkeypatch):
    clock, devices = FitClock(), Devices(time, monkeypatch, asynchronous=False)
    devices.forms = {(2, 3), (1, 3)}
    run(clock, devices, batches(time, rows=5), session=Session(compiled=False))
    assert clock.split().compile == 0.0
    assert clock.ran["train"].firsts == 0


@pytest.mark.parametrize("rows", [2, 4])
def test_a_fit_that_ends_before_a_sample_adds_up(rows, time, monkeypatch):
    clock, devices = FitClock(), Devices(time, monkeypatch, asynchronous=False)
    run(clock, devices, batches(time, rows))
    split = clock.split()
    assert split.input + split.steps + split.compile == pytest.approx(clock.parts[LOOP])
    assert split.compile == (COMPILE if rows == 4 else COMPILE + STEP)


def test_the_first_step_of_validation_counts_as_compiling(time, monkeypatch):
    clock, devices = FitClock(), Devices(time, monkeypatch, asynchronous=False)
    source = batches(time, rows=2 * 10)
    with clock.part(VALIDATION):
        run(clock, devices, source, kind=TEST)
    assert clock.parts[VALIDATION] == 10 * (DRAW + STEP) + COMPILE
    assert clock.split().compile_validation == pytest.approx(COMPILE, abs=DRAW + STEP)
    assert clock.split().steps == clock.split().step == 0.0


class Callback:
    def __init__(self, time):
        self.time = time

    def hook(self, logs):
        self.time.now += 3.0
        return logs()


def test_logs_that_a_callback_reads_are_the_time_of_the_steps(time):
    clock = FitClock()

    def wait(logs):
        time.now += 5.0
        return logs

    with clock.part(LOOP):
        clock.call(None, Callback(time), "hook", lambda: clock.fetched(wait, {}))
    assert clock.callbacks == {"Callback": 3.0}
    assert clock.parts[LOOP] == 5.0


def test_an_error_in_a_hook_leaves_the_clock_right(time):
    clock = FitClock()

    def fails():
        raise ValueError("no")

    with clock.part(LOOP), pytest.raises(ValueError, match="no"):
        clock.call(None, Callback(time), "hook", fails)
    time.now += 1.0
    assert clock.stop() == 4.0
    assert (clock.callbacks["Callback"], clock.parts[LOOP], clock.parts[OTHER]) == (3.0, 0.0, 1.0)
