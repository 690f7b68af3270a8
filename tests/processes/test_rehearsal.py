"""Virtual devices, in either import order, and in words where it is too late."""

import os
import subprocess
import sys

import pytest

from lockstep.rehearsal import rehearse_from_environment
from tests.processes.common import python, warm_python
from tests.tiers import rest

COUNT = "print(lockstep.devices())"
FOUR = "['cpu:0', 'cpu:1', 'cpu:2', 'cpu:3']"


# In a warm process, Keras is imported before lockstep: the tests below have that order.
@pytest.mark.parametrize("imports", ["import lockstep, keras", *rest("import keras, lockstep")])
@pytest.mark.whole
def test_by_environment_in_either_import_order(imports):
    assert python(f"{imports}; {COUNT}", LOCKSTEP_REHEARSE="4") == FOUR


@pytest.mark.whole
def test_by_environment_on_the_backend_of_kerass_own_settings(tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "tensorflow"}')
    settings = {"KERAS_BACKEND": "", "KERAS_HOME": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    assert python(f"import lockstep, keras; {COUNT}", LOCKSTEP_REHEARSE="4", **settings) == FOUR


def test_by_environment_where_kerass_own_settings_name_tensorflow_and_it_is_not_here(
    tmp_path, monkeypatch
):
    """Keras writes them by itself, so: every command and script ended in an ImportError."""
    (tmp_path / "keras.json").write_text('{"backend": "tensorflow"}')
    monkeypatch.delitem(sys.modules, "lockstep.engines.tensorflow.devices", raising=False)
    monkeypatch.delattr("lockstep.engines.tensorflow.devices", raising=False)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    environment = {"LOCKSTEP_REHEARSE": "4", "KERAS_HOME": str(tmp_path)}
    rehearse_from_environment(environment)
    assert environment["JAX_NUM_CPU_DEVICES"] == "4"


@pytest.mark.parametrize("imports", rest("import keras, lockstep", "import lockstep, keras"))
def test_by_call_in_either_import_order(imports):
    assert python(f"{imports}; lockstep.rehearse(devices=4); {COUNT}") == FOUR


def test_without_keras_imported_and_twice_the_same():
    script = f"import lockstep; lockstep.rehearse(4); {COUNT}; lockstep.rehearse(4)"
    assert python(script) == FOUR


def test_a_call_wins_over_the_environment():
    script = f"import lockstep; lockstep.rehearse(devices=4); {COUNT}"
    assert warm_python(script, LOCKSTEP_REHEARSE="2") == FOUR


def test_processes_started_from_here_rehearse_too():
    script = (
        "import lockstep, subprocess, sys; lockstep.rehearse(devices=4)\n"
        "child = 'import lockstep; print(lockstep.devices())'\n"
        "subprocess.run([sys.executable, '-c', child], check=True)"
    )
    assert warm_python(script) == FOUR


STEPS_OF_SOME_WORK = """
import numpy as np
import keras, lockstep
from keras import layers
lockstep.rehearse(devices=4)
units = [layers.Dense(512, "tanh"), layers.Dense(512, "tanh"), layers.Dense(2)]
made = keras.Sequential([keras.Input((256,)), *units])
made.compile("sgd", "mse")
lockstep.distribute(made)
x, y = np.ones((64 * 200, 256), "float32"), np.ones((64 * 200, 2), "float32")
made.fit(x, y, batch_size=64, verbose=0)
print("done")
"""


def test_devices_do_not_take_one_anothers_threads():
    """With a thread for each device, these steps wait for one another, and XLA ends Python."""
    assert warm_python(STEPS_OF_SOME_WORK) == "done"


def test_multi_gpu_model_accepts_rehearsed_devices():
    script = (
        "import keras, lockstep\n"
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "lockstep.multi_gpu_model(model, gpus=4)\n"
        "print(len(model.layers[0].kernel.value.devices()))"
    )
    assert warm_python(script, LOCKSTEP_REHEARSE="4", CUDA_VISIBLE_DEVICES="0, 1, 2, 3") == "4"


TOO_LATE = """
import keras, lockstep
keras.ops.ones(1)
try:
    lockstep.rehearse(devices=4)
except lockstep.errors.RehearsalTooLate as error:
    print(error)
"""


def test_a_backend_that_has_started_is_told():
    assert warm_python(TOO_LATE) == (
        "A rehearsal on 4 virtual CPU devices was requested, but JAX has already started with "
        "1: cpu:0.\n"
        "Devices are fixed at the first operation. Set LOCKSTEP_REHEARSE=4 before Python "
        "starts\n"
        "(or call lockstep.rehearse(devices=4) before the first Keras operation)."
    )


def test_an_environment_that_came_too_late_is_told_at_the_first_call():
    script = (
        "import keras; keras.ops.ones(1)\n"
        "import lockstep\n"
        "try: lockstep.devices()\n"
        "except lockstep.errors.RehearsalTooLate as error: print('told')"
    )
    assert warm_python(script, LOCKSTEP_REHEARSE="4") == "told"


@pytest.mark.parametrize("value", ["0", "many", *rest("-1", "2.5")])
def test_a_number_that_is_none(value):
    script = (
        "import lockstep\n"
        "try: lockstep.devices()\n"
        "except lockstep.errors.DeviceError as error: print(error)"
    )
    assert warm_python(script, LOCKSTEP_REHEARSE=value).startswith(f"LOCKSTEP_REHEARSE={value} was")


@pytest.mark.parametrize("value", ["many", *rest("0")])
def test_a_command_with_a_number_that_is_none_ends_in_words(value):
    """It ended in a traceback of the import, before there was a command to end."""
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "devices"],
        env={**os.environ, "LOCKSTEP_REHEARSE": value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: LOCKSTEP_REHEARSE={value} was requested")
    assert len(done.stderr.splitlines()) <= 3


def test_an_empty_value_is_no_rehearsal():
    assert warm_python(f"import lockstep; {COUNT}", LOCKSTEP_REHEARSE="") == "['cpu:0']"
