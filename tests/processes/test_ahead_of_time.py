"""What a training step does on GPUs, read from programs for GPUs that are not here."""

import importlib.util
import json
from pathlib import Path

import pytest

import lockstep
from lockstep.engines.jax.introspection.ahead_of_time import compiled_bytes
from lockstep.tools.plan.abstract_model import abstract_model
from lockstep.tools.plan.gpus import gpu_named
from tests.processes.common import script, warm_end

COMMAND = Path(__file__).parents[2] / "benchmarks" / "ahead_of_time.py"


def is_here(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


pytestmark = pytest.mark.skipif(
    not (is_here("jax_plugins.xla_cuda12") and is_here("nvidia.cuda_nvcc")),
    reason='needs the compiler for GPUs: pip install -e ".[plan]"',
)


TARGET = """
import keras
import numpy as np

def build():
    hidden = [keras.layers.Dense(512, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((256,)), *hidden])
    model.compile("adam", "mse")
    return model, (np.zeros((30, 256), "float32"), np.zeros((30, 512), "float32"))
"""


def test_a_plan_compiles_for_a_gpu(tmp_path):
    (tmp_path / "train.py").write_text(TARGET)
    words = ["plan", "train.py:build", "--devices", "1,4", "--gpu", "rtx4090", "--json"]
    status, printed, said = warm_end(["-m", "lockstep", *words], tmp_path)
    assert status == 0, said
    found = json.loads(printed)
    assert (found["gpu"], found["memory"]) == ("NVIDIA GeForce RTX 4090", 25757220864)
    peaks = [each["peak"] for each in found["layouts"]]
    assert len(set(peaks)) == 3
    for each in found["layouts"]:
        assert each["peak"] > each["held"] - each["gradients"]
        assert each["verdict"].startswith("fits: ")
    assert "XLA compiles the step of 4 devices, sharded, 30 rows ..." in said


def test_what_a_compiled_step_is_given_is_what_is_planned():
    def build():
        spoken = {}
        exec(TARGET, spoken)
        return spoken["build"]()

    for each in lockstep.plan(build, devices=(1, 4), batch_size=30).layouts:
        model, batch, _ = abstract_model(build, "build", 30, lambda variable: None)
        used, _ = compiled_bytes(model, batch, each, gpu_named("h100"))
        aligned = 256 * 40  # each of some 30 arguments begins at a multiple of 256 bytes
        assert 0 <= used - (each.held - each.gradients) <= aligned


def test_gpus_sum_the_gradients_once():
    said = script(COMMAND, "--models", "pictures", "--devices", "8", "512", "--json")
    few, many = json.loads(said)["results"]
    for each in (few, many):
        assert set(each["collectives"]) == {"all-reduce"}
        assert 1 <= each["bytes all-reduced over gradient bytes"] <= 1.001
        assert each["donated over state bytes"] >= 0.99
    assert few["operations"] == many["operations"]
