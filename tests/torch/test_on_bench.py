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
from lockstep.engines import current_engine


def model():
    made = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def arrays(rows):
    return np.ones((rows, 3)), np.ones((rows, 1))


@pytest.mark.parametrize("devices", [1, 3])
def test_steps_and_rows_are_those_that_were_done(devices):
    made = lockstep.distribute(model(), devices)
    clock = current_engine().probe(made).clock(1000)
    function = made.train_function
    made.fit(*arrays(4 * 32 + 8), verbose=0, callbacks=[clock])
    assert (clock.steps, clock.done, clock.rows, clock.batch) == (5, 5, 136, 32)
    assert int(made.optimizer.iterations.value) == 5
    assert made.train_function is not function
    assert made.train_function.__name__ == "run", "nothing counts afterwards"
    lockstep.release(made)


def test_what_is_measured(monkeypatch):
    made = model()
    found = measure(made, arrays(40), 3, steps=50, rounds=2, batch_size=None)
    assert found.devices == ("cpu:0", "cpu:1", "cpu:2")
    assert (found.rows, found.rows_per_step, found.backend) == (32, 20, "torch")
    assert found.communication > 0
    assert found.compute > 0
    # Rank 0 waits for the others within its steps.
    assert current_engine().probe(made).feed((*arrays(40), None), 8, 3)[0] > 0
    assert current_engine().probe(made).feed((*arrays(40), None), 8, 3)[1] == 3
    lockstep.release(made)
    alone = measure(made, arrays(40), 1, steps=50, rounds=1, batch_size=None)
    assert alone.communication == 0.0


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
