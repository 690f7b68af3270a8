"""What a training step does on GPUs, read from programs for GPUs that are not here."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.processes.common import script

COMMAND = Path(__file__).parents[2] / "benchmarks" / "ahead_of_time.py"


def is_here(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


pytestmark = pytest.mark.skipif(
    not (is_here("jax_plugins.xla_cuda12") and is_here("nvidia.cuda_nvcc")),
    reason='needs the compiler for GPUs: pip install -e ".[ahead]"',
)


def test_gpus_sum_the_gradients_once():
    said = script(COMMAND, "--models", "pictures", "--devices", "8", "512", "--json")
    few, many = json.loads(said)["results"]
    for each in (few, many):
        assert set(each["collectives"]) == {"all-reduce"}
        assert 1 <= each["bytes all-reduced over gradient bytes"] <= 1.001
        assert each["donated over state bytes"] >= 0.99
    assert few["operations"] == many["operations"]
