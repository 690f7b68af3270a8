"""What `bench` counts on TensorFlow, against what is known of the data."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import lockstep
from lockstep.bench.measurement import measure
from lockstep.engines import attachments, current_engine
from lockstep.engines.tensorflow import step_timing


def model(kind=keras.Sequential, **options):
    made = kind([keras.Input((3,)), layers.Dense(4), layers.Dense(1)])
    made.compile("sgd", "mse", **options)
    return made


def arrays(rows):
    return np.ones((rows, 3)), np.ones((rows, 1))


def clocked(made, data, most=1000, **options):
    """A clock that has timed one fit."""
    clock = current_engine().probe(made).clock(most)
    made.fit(*data, verbose=0, callbacks=[clock], **options)
    return clock


def counts(clock):
    return clock.steps, clock.done, clock.rows, clock.batch


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("times", [1, 2, 5, 20])
def test_steps_and_rows_are_those_that_were_done(devices, times):
    made = lockstep.distribute(model(steps_per_execution=times), devices)
    clock = clocked(made, arrays(4 * 32 + 8))
    assert counts(clock) == (5, 5, 136, 32)
    assert clock.executions == -(-5 // times)
    assert int(made.optimizer.iterations.numpy()) == 5
    assert made.train_function.__name__ == "run", "nothing reads the counts afterwards"
    # A second fit counts anew, and its largest batch is its own.
    assert counts(clocked(made, arrays(24), batch_size=8)) == (3, 3, 24, 8)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # as Keras alone does
def test_rows_of_a_data_set_of_unknown_length():
    def batches():
        for rows in (2, 7, 1, 3):
            yield arrays(rows)

    spec = (tf.TensorSpec((None, 3), "float64"), tf.TensorSpec((None, 1), "float64"))
    for times in (1, 3):
        data = tf.data.Dataset.from_generator(batches, output_signature=spec)
        made = lockstep.distribute(model(steps_per_execution=times), 2)
        assert counts(clocked(made, (data,), shuffle=False)) == (4, 4, 13, 7)


class Own(keras.Sequential):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


class CustomStep(keras.Sequential):
    def train_step(self, data):
        return {"half": super().train_step(data)["loss"] / 2}


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")  # run_eagerly
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": True}])
@pytest.mark.parametrize("kind", [Own, CustomStep])
def test_rows_of_code_of_the_models_own(kind, options):
    made = lockstep.distribute(model(kind, **options), 2)
    clock = clocked(made, arrays(6 * 8), batch_size=8)
    assert counts(clock) == (6, 6, 48, 8)


@pytest.mark.whole
def test_xla_compiles_a_counted_step():
    made = lockstep.distribute(model(jit_compile=True, steps_per_execution=2), 1)
    assert counts(clocked(made, arrays(3 * 8), batch_size=8)) == (3, 3, 24, 8)


@pytest.mark.whole
@pytest.mark.parametrize(("most", "times", "steps"), [(10, 1, 10), (1, 1, 4), (10, 3, 12)])
def test_a_round_ends_after_so_many_steps(most, times, steps):
    made = lockstep.distribute(model(steps_per_execution=times), 1)
    clock = clocked(made, arrays(8 * 100), most, batch_size=8)
    assert clock.steps == steps
    # The first execution is not timed: shuffling all rows serves the whole epoch.
    assert clock.done == steps + times == int(made.optimizer.iterations.numpy())


def test_the_counter_changes_no_number_and_traces_the_step_once():
    data = arrays(40)
    found = []
    for counted in (False, True):
        keras.utils.set_random_seed(3)
        made = lockstep.distribute(model(), 2)
        if counted:
            clocked(made, data, batch_size=8, shuffle=False)
            attachment, function = attachments.attachment_of(made), made.train_function
            counter = attachment.counter
            before = counter.compiling
            assert before > 0
            clocked(made, data, batch_size=8, shuffle=False)
            assert made.train_function is function
            assert counter.compiling == before, "the second fit traced nothing"
        else:
            made.fit(*data, batch_size=8, shuffle=False, epochs=2, verbose=0)
        found.append(made.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.whole
def test_what_is_measured():
    made = model()
    found = measure(made, arrays(40), 3, steps=50, rounds=2, batch_size=None)
    assert found.devices == ("cpu:0", "cpu:1", "cpu:2")
    assert (found.rows, found.rows_per_step, found.backend) == (32, 20, "tensorflow")
    assert (found.compute, found.communication) == (None, None)
    assert found.compile > found.step > 0


def test_input_is_drawn_as_fit_draws_it():
    made = []

    class Items(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            made.append(index)
            return arrays(8)

    probe = current_engine().probe(model())
    seconds, number = probe.feed((Items(), None, None), None, 50)
    assert seconds > 0
    assert number == 3
    assert set(made) == {0, 1, 2}
    assert probe.feed((*arrays(40), None), 8, 3)[1] == 3


def test_the_clock_waits_for_the_devices_at_the_end(monkeypatch):
    waits = []
    monkeypatch.setattr(
        step_timing.tf.test.experimental, "sync_devices", lambda: waits.append(True)
    )
    clocked(lockstep.distribute(model(), 1), arrays(16), batch_size=8)
    assert waits == [True]


def test_the_command_measures_each_count_in_a_process_of_its_own(tmp_path):
    (tmp_path / "made.py").write_text(
        "import keras, numpy as np\n"
        "def build():\n"
        "    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])\n"
        "    made.compile('sgd', 'mse')\n"
        "    return made, (np.ones((35, 3)), np.ones((35, 1)))\n"
    )
    command = [sys.executable, "-m", "lockstep", "bench", "made.py:build", "--devices", "1,2"]
    command += ["--rehearse", "--steps", "4", "--rounds", "1", "--batch-size", "10", "--json"]
    environment = {k: v for k, v in os.environ.items() if k != "LOCKSTEP_REHEARSE"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "tensorflow" in told["versions"]
    assert [each["devices"] for each in told["measurements"]] == [["cpu:0"], ["cpu:0", "cpu:1"]]
    assert [each["rows_per_step"] for each in told["measurements"]] == [8.75, 8.75]
    assert "not measured" in told["profiled"]
