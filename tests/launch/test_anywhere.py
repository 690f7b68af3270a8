"""The example `anywhere.py` by each of its launchers: the weights of one process."""

import socket
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.docs.test_pages import slurm
from tests.launch.two_ray_nodes import SOON, clean_environment

pytestmark = pytest.mark.whole

SCRIPT = Path(__file__).parents[2] / "examples" / "anywhere.py"
LOCKSTEP_RUN = [sys.executable, "-m", "lockstep", "run"]


def run(folder, commands):
    """Run processes together; returns what each printed."""
    clean = {**clean_environment(), "KERAS_BACKEND": "jax", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    sizes = ["--samples", "203", "--epochs", "2", "--batch", "50", "--folder", str(folder)]
    started = [
        subprocess.Popen(
            [*command, str(SCRIPT), *sizes],
            env={**clean, "LOCKSTEP_REHEARSE": "2", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, environment in commands
    ]
    printed = [process.communicate(timeout=SOON)[0] for process in started]
    assert not any(process.returncode for process in started), "".join(printed)
    return printed


def weights(folder):
    model = keras.models.load_model(folder / "model.keras")
    return [np.asarray(variable.value) for variable in model.weights]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("python")
    (printed,) = run(folder, [([sys.executable], {"LOCKSTEP_REHEARSE": "1"})])
    assert "jax, 1 device" in printed
    return weights(folder)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def by_python():
    return [([sys.executable], {"LOCKSTEP_REHEARSE": "4"})]


def by_lockstep_run():
    return [([*LOCKSTEP_RUN, "--processes", "2"], {})]


def by_torchrun():
    options = ["--nproc-per-node", "2", "--master-port", free_port()]
    return [([sys.executable, "-m", "torch.distributed.run", *options], {})]


def by_slurm():
    """The variables of Slurm, without Slurm."""
    return [([sys.executable], each) for each in slurm(2)]


def by_kubernetes():
    """The variables of Kubeflow's runtime `jax-distributed`."""
    at = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    return [([sys.executable], {**at, "JAX_PROCESS_ID": str(rank)}) for rank in (0, 1)]


@pytest.mark.parametrize(
    "launcher", [by_python, by_lockstep_run, by_torchrun, by_slurm, by_kubernetes]
)
def test_the_script_trains_the_same_model_in_each_way(launcher, one_device, tmp_path):
    printed = "".join(run(tmp_path, launcher()))
    assert printed.count("jax, 4 devices") == 1
    assert printed.count("Epoch 2/2") == 1
    assert printed.count("model.keras by plain Keras on one device") == 1
    assert {file.name for file in tmp_path.iterdir()} == {"model.keras", "checkpoints"}
    for mine, expected in zip(weights(tmp_path), one_device, strict=True):
        assert np.abs(mine.astype("float64") - expected).max() <= 1e-5
