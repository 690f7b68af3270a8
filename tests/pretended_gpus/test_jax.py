"""JAX on pretended GPUs: what a line does that only runs there."""

import functools
import json

import pytest

from tests.pretended_gpus.common import ROOT, run
from tests.pretended_gpus.conditions import unseen
from tests.tiers import further

PROGRAMS = "tests.pretended_gpus.programs"
MODEL = "examples/minimal.py:build"
OTHERS = (
    "numbers",
    "sharded",
    "in_parts",
    "checkpoints",
    "predictions",
    "several_steps profiled refusals",
)
NOT_REACHED = {
    "checkpoint/plain_state.py": "it asks PyTorch",
    "keras_compat/calls.py device_scope": "it asks PyTorch",
    "processes/shares.py devices_of_process": "JAX takes the devices that its process sees",
    "tools/bench/measurement.py": "it asks PyTorch",
    "tools/verify/float64.py": "two runs on the same pretended GPUs never leave 1e-5",
}
"""Where conditions are that no program here reaches, and why."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A function that runs Python on pretended GPUs, each command once."""
    return runner(tmp_path_factory)


def runner(tmp_path_factory, tpus=False):
    """A function that runs Python on pretended GPUs or TPUs, each command once."""
    notes = tmp_path_factory.mktemp("notes")

    @functools.cache
    def once(*arguments, devices=4, processes=1, here=False, **environment):
        folder = tmp_path_factory.mktemp("run")
        if processes > 1:
            environment["RUN"] = str(folder)
        if tpus:
            environment["PRETENDED_TPUS"] = str(devices)
        return run(
            *arguments,
            engine="jax",
            devices=devices,
            processes=processes,
            cwd=ROOT if here else folder,
            XLA_FLAGS="--xla_backend_optimization_level=0",
            NOTED_CONDITIONS=str(notes / "conditions"),
            **environment,
        )

    once.notes = notes / "conditions"
    return once


def branches_and_draws(ran):
    return ran("-m", PROGRAMS, "branches", "numpy_draws", "resumed_draws", here=True)


def in_processes(ran, devices):
    return ran("-m", PROGRAMS, "numpy_draws", devices=devices, processes=2, here=True)


def others(ran, program):
    return ran("-m", PROGRAMS, *program.split(), here=True, LOCKSTEP_GATHER_AGAIN="1")


def sharded_in_processes(ran, devices):
    programs = ("checkpoints_in_processes", "sharded", "refusals")
    return ran("-m", PROGRAMS, *programs, devices=devices, processes=2, here=True)


def tools(ran):
    """`JAX_PLATFORMS=cuda` leaves no CPU, and `bench` counts the GPUs alone."""
    script = """
import json, lockstep
from examples.minimal import build
print(json.dumps(lockstep.devices()))
model, data = build()
found = lockstep.bench(model, data, steps=2, rounds=1)
print(json.dumps([each.devices for each in found.measurements]))
print(lockstep.plan(build, devices=[1, 2], memory="1GB"))
"""
    return ran("-c", script, devices=2, here=True, PRETENDED_NO_CPU="1")


def doctor(ran):
    cached = {"XDG_CACHE_HOME": str(ran.notes.parent), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    return ran("-m", "lockstep", "doctor", "--devices", "--train", devices=2, here=True, **cached)


def verified(ran):
    return ran("-m", "lockstep", "verify", MODEL, "--steps", "2", devices=2, here=True)


def launched(ran):
    arguments = ["run", "--processes", "2", str(ROOT / "examples" / "minimal.py"), "--epochs", "1"]
    return ran("-m", "lockstep", *arguments)


def test_branches_and_data_that_draw_numbers_leave_what_one_device_leaves(ran):
    branches_and_draws(ran)


@pytest.mark.parametrize("devices", [1, *further(2)])
def test_processes_with_gpus_of_their_own_leave_what_one_device_leaves(ran, devices):
    in_processes(ran, devices)


@pytest.mark.thorough
@pytest.mark.parametrize("program", OTHERS)
def test_everything_else_leaves_what_one_device_leaves(ran, program):
    others(ran, program)


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 2])
def test_sharded_state_and_runs_of_processes_leave_what_one_device_leaves(ran, devices):
    sharded_in_processes(ran, devices)


@pytest.mark.thorough
def test_the_tools_count_gpus_and_not_the_cpu(ran):
    said = tools(ran)
    assert said.startswith('["gpu:0", "gpu:1"]'), said
    assert '[["gpu:0"], ["gpu:0", "gpu:1"]]' in said


@pytest.mark.thorough
def test_the_commands_run(ran):
    said = doctor(ran)
    assert "1 pair of devices tested" in said
    assert "gpu:0, gpu:1: training gives the same results as on one device." in said
    assert "2 devices give the same results as one device." in verified(ran)
    assert "4 devices (gpu:0 to gpu:3)" in launched(ran)


@pytest.mark.thorough
def test_every_condition_on_devices_and_places_had_the_values_of_gpus(ran):
    branches_and_draws(ran)
    for devices in (1, 2):
        in_processes(ran, devices)
        sharded_in_processes(ran, devices)
    for program in OTHERS:
        others(ran, program)
    for each in (tools, doctor, verified, launched):
        each(ran)
    ran("-c", SHARED, devices=1, LOCKSTEP_SHARE_GPU="2")
    of_others = ("engines/tensorflow/", "engines/torch/")
    assert not unseen(ran.notes, NOT_REACHED, but=of_others)


SHARED = """
import sys, keras, lockstep
try:
    print(lockstep.devices())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    lockstep.distribute(model)
    model.compile("sgd", "mse")
    x = keras.ops.ones((6, 3))
    model.fit(x, x[:, :2], batch_size=6, verbose=2)
except lockstep.errors.LockstepError as error:
    print(error, file=sys.stderr)
"""


@pytest.mark.thorough
def test_one_gpu_is_a_device_of_each_process(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SHARED)
    shared = {"engine": "jax", "devices": 1, "cwd": tmp_path, "LOCKSTEP_SHARE_GPU": "2"}
    launch = ("-m", "lockstep", "run", "--processes", "2", file)
    said = run(*launch, **shared)
    assert "2 devices (gpu:0, gpu:1, one GPU, shared, 38% of its memory each)" in said
    assert "NCCL 2.27.3 is installed, but 2.30 or later is needed" in run(
        *launch, **shared, PRETENDED_NCCL="2.27.3"
    )
    assert "Start the script with: lockstep run --processes 2 SCRIPT" in run(file, **shared)


@pytest.mark.thorough
def test_the_check_for_gpus_finds_nothing(tmp_path):
    """`benchmarks/gpu_check.py` with small models, two and three ranks on one pretended GPU."""
    words = ["--small", "--backends", "jax", "--cards", "1", "--json", tmp_path / "found.json"]
    parts = ["--parts", "experiments", "numbers", "memory"]
    run(ROOT / "benchmarks" / "gpu_check.py", *words, *parts, engine="jax", devices=1)
    outcomes = json.loads((tmp_path / "found.json").read_text())["outcomes"]
    assert {each["status"] for each in outcomes} == {0}
    assert len(outcomes) >= 10
