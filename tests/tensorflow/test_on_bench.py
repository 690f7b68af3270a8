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

from lockstep.bench.measurement import measure


def model(kind=keras.Sequential, **options):
    made = kind([keras.Input((3,)), layers.Dense(4), layers.Dense(1)])
    made.compile("sgd", "mse", **options)
    return made


def arrays(rows):
    return np.ones((rows, 3)), np.ones((rows, 1))


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("times", [1, 2, 20])
def test_what_is_measured(devices, times):
    """Keras numbers the last of 5 steps, 20 in one execution, as the 20th."""
    made = model(steps_per_execution=times)
    found = measure(made, arrays(4 * 32 + 8), devices, steps=50, rounds=1, batch_size=None)
    assert len(found.devices) == devices
    assert (found.rows, found.rows_per_step, found.backend) == (32, 27.2, "tensorflow")
    assert found.steps_per_execution == 5 / -(-5 // times)
    assert int(made.optimizer.iterations.numpy()) == 5 * 3
    assert (found.compute, found.communication, found.compile) == (None, None, None)
    assert found.step > 0
    assert found.input > 0


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # as Keras alone does
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_rows_of_a_data_set_of_unknown_length():
    def batches():
        for rows in (2, 7, 1, 3):
            yield arrays(rows)

    spec = (tf.TensorSpec((None, 3), "float64"), tf.TensorSpec((None, 1), "float64"))
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    for times in (1, 3):
        made = model(steps_per_execution=times)
        found = measure(made, data, 2, steps=50, rounds=1, batch_size=None)
        assert (found.rows, found.rows_per_step) == (7, 13 / 4)
        assert found.steps_per_execution == 4 / -(-4 // times)


@pytest.mark.whole
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
