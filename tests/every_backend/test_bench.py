"""What `bench` counts on each backend, against what is known of the data."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.tools.bench.measurement import measure
from tests.tiers import rest

BACKEND = keras.backend.backend()


@pytest.mark.parametrize("devices", [3, *rest(1)])
@pytest.mark.parametrize("times", [1] if BACKEND == "torch" else [2, *rest(1, 20)])
def test_what_is_counted(devices, times):
    """Keras numbers the last of 5 steps, 20 in one execution, as the 20th."""
    made = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(1)])
    made.compile("sgd", "mse", steps_per_execution=times)
    data = np.ones((4 * 32 + 8, 3)), np.ones((4 * 32 + 8, 1))
    found = measure(made, data, devices, steps=50, rounds=1, batch_size=None)
    assert len(found.devices) == devices
    assert (found.rows, found.rows_per_step, found.backend) == (32, 27.2, BACKEND)
    assert found.steps_per_execution == 5 / -(-5 // times)
    assert int(made.optimizer.iterations) == 5 * 3, "a round to compile, one, and a profile"
    assert found.step > 0
    assert found.input > 0
    # PyTorch computes in the main thread of a CPU. The table said 0 ms.
    assert (found.host is None) == (BACKEND == "torch")
    if BACKEND != "jax":
        assert (found.compute, found.communication, found.compile) == (None, None, None)
    lockstep.release(made)


SCRIPT = """
import keras, numpy as np

def build():
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(64), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made, (np.ones((35, 3)), np.ones((35, 1)))
"""


@pytest.mark.whole
def test_the_command_measures_each_count_in_a_process_of_its_own(tmp_path):
    (tmp_path / "made.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "lockstep", "bench", "made.py:build", "--devices", "1,2"]
    command += ["--rehearse", "--steps", "4", "--rounds", "1", "--batch-size", "10", "--json"]
    environment = {k: v for k, v in os.environ.items() if k != "LOCKSTEP_REHEARSE"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert BACKEND in told["versions"]
    assert [each["devices"] for each in told["measurements"]] == [["cpu:0"], ["cpu:0", "cpu:1"]]
    assert [each["rows_per_step"] for each in told["measurements"]] == [8.75, 8.75]
    assert ("not measured" in told["profiled"]) == (BACKEND != "jax")
