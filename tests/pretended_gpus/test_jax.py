"""JAX on pretended GPUs: what a line does that only runs there."""

import pytest

from tests.pretended_gpus.common import ROOT, run
from tests.tiers import further

PROGRAMS = "tests.pretended_gpus.programs"
XLA = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
MODEL = "examples/minimal.py:build"


def test_branches_and_data_that_draw_numbers_leave_what_one_device_leaves():
    run("-m", PROGRAMS, "branches", "numpy_draws", engine="jax", **XLA)


@pytest.mark.parametrize("devices", [1, *further(2)])
def test_processes_with_gpus_of_their_own_leave_what_one_device_leaves(devices, tmp_path):
    programs = ["checkpoints_in_processes", "numpy_draws"]
    run("-m", PROGRAMS, *programs, engine="jax", devices=devices, processes=2, RUN=tmp_path, **XLA)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "program", ["numbers", "sharded", "in_parts", "checkpoints", "predictions"]
)
def test_everything_else_leaves_what_one_device_leaves(program):
    run("-m", PROGRAMS, program, engine="jax", LOCKSTEP_GATHER_AGAIN="1", **XLA)


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 2])
def test_sharded_state_in_processes_leaves_what_one_device_leaves(devices):
    run("-m", PROGRAMS, "sharded", engine="jax", devices=devices, processes=2, **XLA)


def test_the_tools_count_gpus_and_not_the_cpu():
    """`JAX_PLATFORMS=cuda` leaves no CPU, and `bench` counts the GPUs alone."""
    script = """
import json, lockstep
from lockstep.cli import main
from examples.minimal import build
print(json.dumps(lockstep.devices()))
model, data = build()
found = lockstep.bench(model, data, steps=2, rounds=1)
print(json.dumps([each.devices for each in found.measurements]))
print(lockstep.plan(build, [1, 2], memory="1GB"))
main(["doctor", "--devices"], standalone_mode=False)
"""
    said = run("-c", script, engine="jax", devices=2, PRETENDED_NO_CPU="1", **XLA)
    assert said.startswith('["gpu:0", "gpu:1"]'), said
    assert '[["gpu:0"], ["gpu:0", "gpu:1"]]' in said
    assert "1 pair of devices tested" in said


@pytest.mark.thorough
def test_the_commands_run(tmp_path):
    said = run("-m", "lockstep", "verify", MODEL, "--steps", "2", engine="jax", devices=2, **XLA)
    assert "2 devices give what one device gives." in said
    arguments = ["run", "--processes", "2", ROOT / "examples" / "minimal.py", "--epochs", "1"]
    said = run("-m", "lockstep", *arguments, engine="jax", devices=4, cwd=tmp_path, **XLA)
    assert "4 devices (gpu:0 to gpu:3)" in said
