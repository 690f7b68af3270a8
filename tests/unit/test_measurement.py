"""What `bench` counts and times, against what is known of the data."""

import contextlib
import threading

import numpy as np
import pytest

import lockstep
from lockstep.engines.jax.introspection import measured_times
from lockstep.engines.jax.introspection.measured_times import MeasuredTimes
from lockstep.errors import UnusableData
from lockstep.tools.batches import first_batches, for_fit, rows_of
from lockstep.tools.bench import measurement
from lockstep.tools.bench.measurement import measure
from lockstep.tools.bench.step_clock import StepClock
from lockstep.training.arrays import Arrays


def model(keras, **options):
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    made.compile("sgd", "mse", **options)
    return made


def arrays(rows):
    return np.ones((rows, 3), "float32"), np.ones((rows, 1), "float32")


def clocked(made, data, most, **options):
    """A clock that has timed one fit."""
    clock = StepClock(most)
    made.fit(*data, verbose=0, callbacks=[clock], **options)
    return clock


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize(("times", "batches"), [(20, 25), (64, 32), (1, 5), (4, 8)])
def test_steps_are_those_that_were_done(keras, times, batches, devices):
    """Keras numbers the last of 25 steps, 20 in one execution, as the 40th."""
    made = lockstep.distribute(model(keras, steps_per_execution=times), devices)
    clock = clocked(made, arrays(batches * 8), 1000, batch_size=8)
    assert (clock.steps, clock.done) == (batches, batches)
    assert int(made.optimizer.iterations.value) == batches


def test_steps_of_a_fit_of_the_models_own(keras):
    class Own(keras.Sequential):
        def fit(self, *args, **kwargs):
            return super().fit(*args, **kwargs)

    made = Own([keras.Input((3,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse", steps_per_execution=4)
    clock = clocked(lockstep.distribute(made, 1), arrays(6 * 8), 1000, batch_size=8)
    assert clock.steps == 6


@pytest.mark.parametrize(("most", "times", "steps"), [(10, 1, 10), (1, 1, 4), (10, 3, 12)])
def test_a_round_ends_after_so_many_steps(keras, most, times, steps):
    made = lockstep.distribute(model(keras, steps_per_execution=times), 1)
    assert clocked(made, arrays(8 * 100), most, batch_size=8).steps == steps


def test_what_an_epoch_begins_with_is_not_of_the_few_steps_of_a_round(keras):
    """To shuffle a million rows took longer than fifty small steps, which were said to take it."""
    for batches, timed in ((15, 10), (11, 10), (10, 10), (9, 9)):
        made = lockstep.distribute(model(keras), 1)
        clock = clocked(made, arrays(8 * batches), 10, batch_size=8)
        assert clock.steps == timed
        assert clock.done == int(made.optimizer.iterations.value) == min(11, batches)


def test_a_fit_that_takes_no_step_is_refused(keras):
    class Own(keras.Sequential):
        def fit(self, *args, **kwargs):
            pass

    made = Own([keras.Input((3,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    assert "own fit, which ran no training steps through" in refused(made, arrays(8))


def test_rows_per_second_are_of_the_rows_that_were_trained_on(keras):
    found = measure(model(keras), arrays(40), 1, steps=50, rounds=2, batch_size=None)
    assert (found.rows, found.rows_per_step) == (32, 20)
    assert found.rows_per_second == pytest.approx(20 / found.step)


@pytest.fixture
def found(keras, monkeypatch):
    """What comes of two rounds of 1 s and 6 s, and of a profile of 11 steps, one of them timed."""
    walls = iter([1, 1, 6, 3])

    class Clock:
        steps = executions = host = 1
        done = 11

        def __init__(self, most, batches):
            self.wall = next(walls)

    made = model(keras)
    monkeypatch.setattr(made, "fit", lambda *args, **kwargs: None)
    monkeypatch.setattr(measurement, "StepClock", Clock)
    worked = MeasuredTimes(compute=22, communication=11)
    monkeypatch.setattr(
        measured_times, "profiled", lambda *, devices: contextlib.nullcontext(worked)
    )
    return measure(made, arrays(8), 1, steps=1, rounds=2, batch_size=None)


def test_the_quartiles_are_within_what_was_measured(found):
    """The exclusive quartiles of 1 and 6 are -0.25 and 7.25."""
    assert (found.step, found.spread) == (3.5, (2.25, 4.75))


def test_the_profile_is_of_every_step(found):
    assert (found.compute, found.communication) == (2, 1)


def test_a_profile_that_is_full_is_made_again_of_fewer_steps(keras, monkeypatch):
    monkeypatch.setattr(measured_times, "_MOST_EVENTS", 2500)
    clocks, full, real = [], [], measured_times.profiled

    class Clock(StepClock):
        def __init__(self, most, batches):
            clocks.append(most)
            super().__init__(most, batches)

    @contextlib.contextmanager
    def profiled(*, devices):
        with real(devices=devices) as found:
            yield found
        full.append(found.full)

    monkeypatch.setattr(measurement, "StepClock", Clock)
    monkeypatch.setattr(measured_times, "profiled", profiled)
    found = measure(model(keras), arrays(8 * 100), 2, steps=80, rounds=1, batch_size=8)
    assert clocks == [80, 80, 80, 8]
    assert full == [False, True, False]
    assert found.compute > 0


# ------------------------------------------------------------------------------ the input


def items(keras, batches, **options):
    """A data set, and for every batch that was made its number and the thread that made it."""
    made = []

    class Items(keras.utils.PyDataset):
        def __len__(self):
            return batches

        def __getitem__(self, index):
            made.append((index, threading.current_thread()))
            return arrays(8)

    return Items(**options), made


def drawn(made, data, most, batch_size=None):
    """The rows of each batch that was drawn."""
    made = lockstep.distribute(made, 1)
    return measurement.draw(made, for_fit(data, batch_size), batch_size, most)[1]


def test_input_is_that_of_the_batches_that_were_made(keras):
    """Three batches were gone through again to make fifty, and their time was divided by fifty."""
    data, made = items(keras, 3)
    assert drawn(model(keras), data, 50) == [8] * 3
    assert sorted(index for index, _ in made) == [0, 1, 2]
    del made[:]
    assert drawn(model(keras), data, 2) == [8] * 2
    assert len(made) == 3  # the first one comes before what is timed


def test_input_is_made_by_the_workers_of_the_data(keras):
    data, made = items(keras, 40, workers=2)
    assert drawn(model(keras), data, 10) == [8] * 10
    workers = {thread for _, thread in made}
    assert threading.main_thread() not in workers
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()  # they end with what was drawn


def test_input_of_arrays_is_their_rows_in_the_order_of_fit(keras, monkeypatch):
    """It was slices, which are views and cost nothing; fit gathers shuffled rows."""
    taken = []

    def noting(arrays, rows, **options):
        taken.append(original(arrays, rows, **options))
        return taken[-1]

    original = Arrays.batch
    monkeypatch.setattr(Arrays, "batch", noting)
    x = np.arange(40)
    assert drawn(model(keras), (x, x), 50, batch_size=16) == [16, 16, 8]
    assert len(taken) == 3
    rows = np.concatenate([batch[0] for batch in taken])
    assert sorted(rows) == sorted(x)
    assert list(rows) != list(x)


# ------------------------------------------------------------------------------- the data


def refused(made, data, batch_size=None):
    with pytest.raises(UnusableData) as error:
        measure(made, data, 1, steps=2, rounds=1, batch_size=batch_size)
    assert len(str(error.value).splitlines()) <= 3
    return str(error.value)


def test_data_that_one_fit_would_use_up_are_refused(keras):
    batches = (arrays(8) for _ in range(50))
    assert "a generator is used up after one.\nReturn arrays" in refused(model(keras), batches)
    assert len(list(batches)) == 50


def test_data_without_a_batch_are_refused(keras):
    assert "the tuple has none" in refused(model(keras), arrays(0))
    assert "the Items has none" in refused(model(keras), items(keras, 0)[0])


def test_a_batch_size_for_a_data_set_is_refused(keras):
    found = refused(model(keras), items(keras, 3)[0], batch_size=8)
    assert found == (
        "batch_size=8 was given, but the data are a Items, which makes its own batches.\n"
        "Remove batch_size."
    )


def test_inputs_alone(keras):
    """The columns of an array were taken for its rows."""

    class Alone(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(16)

        def call(self, inputs):
            return self.dense(inputs["x"] if isinstance(inputs, dict) else inputs)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(y_pred**2)

    x = np.ones((24, 16), "float32")
    for data in (x, {"x": x}, (x,)):
        made = Alone()
        made.compile("sgd")
        found = measure(made, data, 1, steps=3, rounds=1, batch_size=8)
        assert (found.rows, found.rows_per_step) == (8, 8)
        assert [rows_of(batch) for batch in first_batches(x, 3, 8)] == [8, 8, 8]


# --------------------------------------------------------------------------- the end of it


@pytest.mark.parametrize("own_fit", [False, True])
def test_the_clock_waits_for_a_step_that_gives_no_logs(keras, own_fit, monkeypatch):
    class Silent(keras.Sequential):
        def train_step(self, state, data):
            _, state = super().train_step(state, data)
            return {}, state

    class Own(Silent):  # so that Keras's loop runs
        def fit(self, *args, **kwargs):
            return super().fit(*args, **kwargs)

    waited = []
    wait = keras.ops.convert_to_numpy

    def waiting(value):
        waited.append(value.shape)
        return wait(value)

    made = (Own if own_fit else Silent)([keras.Input((3,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    lockstep.distribute(made, 2)
    monkeypatch.setattr(keras.ops, "convert_to_numpy", waiting)
    assert clocked(made, arrays(16), 10, batch_size=8).steps == 2
    assert waited == [(1,)]
