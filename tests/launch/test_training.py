"""One script trains the same model in one process or several, by any launcher, after any fault."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.launch.train import ROWS, build, data
from tests.processes.common import clean_environment

HERE = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("train.py")
LOCKSTEP_RUN = [sys.executable, "-m", "lockstep", "run"]


def launch(command, folder, *arguments, **environment):
    clean = clean_environment()
    more = {
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "KERAS_BACKEND": "jax",
        "PYTHONPATH": str(HERE / "src"),
    }
    return subprocess.Popen(
        [*command, str(SCRIPT), str(folder), *arguments],
        env={**clean, **more, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_of(process):
    try:
        return process.communicate(timeout=400)
    finally:
        process.kill()


@pytest.fixture(scope="module")
def truth():
    """The weights of stock Keras on one device."""
    model = build()
    x, y = data()
    model.fit(x, y, **ROWS, verbose=0)
    return [np.asarray(variable.value) for variable in model.weights]


def assert_trained(folder, truth):
    loaded = keras.models.load_model(folder / "model.keras")
    got = [np.asarray(variable.value) for variable in loaded.weights]
    assert len(got) == len(truth)
    for mine, expected in zip(got, truth, strict=True):
        assert np.abs(mine.astype("float64") - expected).max() <= 1e-5


def assert_one_set(folder, out):
    """One process has written, and one has shown its progress."""
    assert {file.name for file in folder.iterdir()} - {"failed"} == {"model.keras", "checkpoints"}
    assert out.count("Epoch 3/3") == 1
    assert sum("trained by process" in line for line in out.splitlines()) in (1, 2)


FAULTS = ["killed", "raises"]
WORDS = {"killed": "ended by SIGKILL", "raises": "OSError: the disk is full"}


@pytest.mark.parametrize(
    ("fault", "at"),
    [
        pytest.param(fault, at, marks=[] if (fault, at) in SAMPLE else [pytest.mark.whole])
        for SAMPLE in [[("killed", 1)]]
        for fault in FAULTS
        for at in (0, 1)
    ],
)
def test_two_processes_train_what_one_device_trains_after_a_fault_of_one(
    fault, at, tmp_path, truth
):
    options = ["--processes", "2", "--devices-per-process", "2", "--restarts", "1"]
    process = launch([*LOCKSTEP_RUN, *options], tmp_path, fault, str(at))
    out, error = end_of(process)
    assert process.returncode == 0, out + error
    assert f"process {at} of 2 failed first: {WORDS[fault]}" in error
    assert "restart 1 of 1" in error
    assert "lockstep: resumes from" in out
    assert "jax, 4 devices" in out
    assert "never called lockstep.distribute" not in error
    assert_trained(tmp_path, truth)
    assert_one_set(tmp_path, out)


@pytest.mark.whole
def test_two_processes_of_torchrun_train_what_one_device_trains(tmp_path, truth):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    process = launch([*command, "--master-port", port], tmp_path, LOCKSTEP_REHEARSE="2")
    out, error = end_of(process)
    assert process.returncode == 0, out + error
    assert f"lockstep: 2 processes connect at 127.0.0.1:{int(port) + 1} (torchrun: RANK," in error
    assert "jax, 4 devices" in out
    assert_trained(tmp_path, truth)
    assert_one_set(tmp_path, out)


@pytest.mark.whole
def test_one_process_of_four_devices_trains_what_one_device_trains(tmp_path, truth):
    process = launch([*LOCKSTEP_RUN, "--devices-per-process", "4"], tmp_path)
    out, error = end_of(process)
    assert process.returncode == 0, out + error
    assert_trained(tmp_path, truth)
    assert_one_set(tmp_path, out)


@pytest.mark.whole
@pytest.mark.parametrize("at", [0, 1])
def test_a_process_that_is_stopped_in_a_fit_is_named(at, tmp_path):
    options = ["--processes", "2", "--devices-per-process", "2", "--hang-timeout", "45"]
    process = launch([*LOCKSTEP_RUN, *options], tmp_path, "stopped", str(at))
    _, error = end_of(process)
    assert process.returncode == 124
    assert f"process {at} of 2 failed first: made no progress in training, epoch 2, after" in error
    assert "it was suspended by a signal" in error
    assert "train.py" in error  # in the stack of the other process


@pytest.mark.whole
def test_ctrl_c_saves_and_the_next_run_goes_on(tmp_path, truth):
    options = ["--processes", "2", "--devices-per-process", "2"]
    process = launch([*LOCKSTEP_RUN, *options], tmp_path, "waits", "1")
    said = []
    for line in process.stdout:
        said.append(line)
        if "Epoch 2/3" in line:
            process.send_signal(signal.SIGINT)
    out, error = end_of(process)
    assert process.returncode == 128 + signal.SIGINT, "".join(said) + error
    assert "failed" not in error
    assert not (tmp_path / "model.keras").exists()
    process = launch([*LOCKSTEP_RUN, *options], tmp_path)
    out, error = end_of(process)
    assert "lockstep: resumes from" in out
    assert_trained(tmp_path, truth)


def test_a_port_in_use_is_told_in_words(tmp_path):
    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        port = used.getsockname()[1]
        names = {"PROCESSES": "2", "PROCESS": "0", "COORDINATOR": f"127.0.0.1:{port}"}
        ours = {f"LOCKSTEP_{name}": value for name, value in names.items()}
        process = launch([sys.executable], tmp_path, LOCKSTEP_REHEARSE="2", **ours)
        _, error = end_of(process)
    assert process.returncode == 1
    assert f"connect at 127.0.0.1:{port}: port {port} of this host: Address already in use" in error
