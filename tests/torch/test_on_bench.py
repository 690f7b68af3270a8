"""What `bench` counts on PyTorch, against what is known of the data."""

import json

import keras
import numpy as np
import pytest
from click.testing import CliRunner
from keras import layers

import lockstep
from lockstep.bench.measurement import measure
from lockstep.cli import main


def model():
    made = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def arrays(rows):
    return np.ones((rows, 3)), np.ones((rows, 1))


@pytest.mark.parametrize("devices", [1, 3])
def test_what_is_measured(devices):
    made = model()
    found = measure(made, arrays(40), devices, steps=50, rounds=2, batch_size=None)
    assert len(found.devices) == devices
    assert (found.rows, found.rows_per_step, found.backend) == (32, 20, "torch")
    assert int(made.optimizer.iterations.value) == 2 * 4, "one round to compile, two, a profile"
    assert (found.host, found.compute, found.communication, found.compile) == (0, None, None, None)
    assert found.input > 0
    lockstep.release(made)


@pytest.mark.whole
def test_the_command(tmp_path):
    (tmp_path / "made.py").write_text(
        "import keras, numpy as np\n"
        "def build():\n"
        "    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])\n"
        "    made.compile('sgd', 'mse')\n"
        "    return made, (np.ones((64, 3)), np.ones((64, 1)))\n"
    )
    target = f"{tmp_path / 'made.py'}:build"
    options = ["--devices", "1,2", "--rehearse", "--steps", "4", "--rounds", "1", "--json"]
    done = CliRunner().invoke(main, ["bench", target, *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert "torch" in found["versions"]
    assert [len(each["devices"]) for each in found["measurements"]] == [1, 2]
