"""Slurm starts the processes of two nodes, kills them, and queues their job again."""

import json
import shutil
import zipfile

import h5py
import numpy as np
import pytest

from tests.launchers.two_nodes import SOURCE, TRAIN, assert_equal, read, until

pytestmark = pytest.mark.thorough

EXAMPLES = SOURCE.parent / "examples"
BACKENDS = ("jax", "torch")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def steps(folder, rank=0):
    """The number of steps that a process has made, and its number on its host."""
    file = folder / f"progress-{rank}"
    return [int(word) for word in file.read_text().split()] if file.exists() else [0, 0]


@pytest.mark.parametrize("rows", [(), ("--own-rows",)], ids=["", "own rows"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_srun_trains_on_two_nodes_what_one_device_trains(backend, rows, nodes, alone, tmp_path):
    options = ("--nodes=2", "--ntasks=2", "python", TRAIN, "--folder", tmp_path, *rows)
    more = {"KERAS_BACKEND": backend, "LOCKSTEP_REHEARSE": "2" if backend == "jax" else "1"}
    status, out, error = nodes.run("srun", *options, **more)
    assert status == 0, out + error
    assert {"process 0 of 2 on node1", "process 1 of 2 on node2"} <= {*out.splitlines()}
    assert f"{backend}, {4 if backend == 'jax' else 2} devices" in out
    assert out.count("Epoch 3/3") == 1
    assert ("rows of 2 processes" in out) is bool(rows)
    assert "[c10d]" not in error
    for rank in (0, 1):
        assert_equal(read(tmp_path, rank), alone(backend, *rows))


@pytest.mark.parametrize(
    ("backend", "option"),
    [*((name, ["--kill-on-bad-exit=1"]) for name in BACKENDS), ("torch", [])],
    ids=["jax", "torch", "torch, plain srun"],
)
def test_a_killed_task_ends_the_step_with_an_error(backend, option, nodes, tmp_path):
    """With the option of the example Slurm ends the others, without it they end by themselves."""
    options = ("--nodes=2", "--ntasks=2", *option, "python", TRAIN, "--folder", tmp_path)
    more = {"KERAS_BACKEND": backend, "LOCKSTEP_REHEARSE": "1", "LOCKSTEP_PATIENCE": "40"}
    running = nodes.start("srun", *options, PAUSE="1", **more)
    until(lambda: steps(tmp_path, 1)[0] >= 3)
    nodes.ask("kill", "-KILL", steps(tmp_path, 1)[1])
    out, error = nodes.end_of(running, most=60 if option else 100)
    assert running.returncode not in (0, 124), out + error
    assert "task 1: Killed" in error
    assert steps(tmp_path)[0] < 18, "process 0 went on alone"
    if not option:
        assert "ProcessesDisagree: Process 0 has " in error


def submit(nodes, folder, *options, **environment):
    """Submit the batch script of the examples, with its files in the current folder."""
    log = f"--output={folder / 'job.log'}"
    given = ("sbatch", "--parsable", log, *options, EXAMPLES / "slurm.sh")
    status, out, error = nodes.run(*given, cwd=folder, **environment)
    assert status == 0, out + error
    return out.strip()


def end_of(nodes, job, folder):
    state = until(lambda: (found := nodes.state(job)) in ENDED and found)
    log = (folder / "job.log").read_text()
    assert state == "COMPLETED", log + nodes.logs()
    return log


def test_the_batch_script_of_the_examples_as_it_stands(nodes, tmp_path):
    """In double precision by the environment alone."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "keras.json").write_text(json.dumps({"floatx": "float64", "backend": "jax"}))
    double = {"KERAS_HOME": str(home), "JAX_ENABLE_X64": "1", "KERAS_BACKEND": "jax"}
    models = {}
    for name in ("alone", "job"):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("anywhere.py", "check_file.py"):
            shutil.copy(EXAMPLES / file, folder)
        if name == "alone":
            more = {"LOCKSTEP_REHEARSE": "1", **double}
            status, out, error = nodes.run("python", "anywhere.py", cwd=folder, **more)
            assert status == 0, out + error
        else:
            job = submit(nodes, folder, LOCKSTEP_REHEARSE="4", **double)
            out = end_of(nodes, job, folder)
            assert "jax, 8 devices" in out
        assert out.count("model.keras by plain Keras on one device") == 1
        models[name] = weights(folder / "runs" / "anywhere" / "model.keras")
    assert models["job"].keys() == models["alone"].keys() != set()
    for name, expected in models["alone"].items():
        assert np.abs(models["job"][name] - expected).max() <= 1e-10, name


def weights(path):
    """The arrays in a file of Keras, by name; this process computes in single precision."""
    found = {}
    with zipfile.ZipFile(path) as file, h5py.File(file.open("model.weights.h5")) as arrays:
        arrays.visititems(
            lambda name, each: found.update({name: each[()]}) if hasattr(each, "dtype") else None
        )
    return {name: value for name, value in found.items() if value.size}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_that_is_queued_again_goes_on_at_its_checkpoint(backend, nodes, alone, tmp_path):
    """The first time by the warning of a time limit, the second time from outside."""
    shutil.copy(TRAIN, tmp_path / "anywhere.py")
    runs = tmp_path / "runs" / "anywhere"
    tasks = "1" if backend == "jax" else "2"
    more = {"KERAS_BACKEND": backend, "LOCKSTEP_REHEARSE": "2" if backend == "jax" else "1"}
    job = submit(nodes, tmp_path, f"--ntasks-per-node={tasks}", PAUSE="0.7", **more)

    def reaches(count):
        until(lambda: steps(runs)[0] >= count or nodes.state(job) in ENDED)
        assert steps(runs)[0] >= count, (tmp_path / "job.log").read_text() + nodes.logs()

    reaches(3)
    nodes.ask("scancel", "--signal=TERM", job)  # to the tasks, as --signal=TERM@120 does
    until(lambda: "run the same command to resume" in (tmp_path / "job.log").read_text())
    reaches(steps(runs)[0] + 2)
    nodes.ask("scontrol", "requeue", job)
    log = end_of(nodes, job, tmp_path)
    assert log.count("run the same command to resume") == 2, log
    assert log.count("lockstep: resumes from") == 2, log
    assert f"{backend}, 4 devices" in log
    for rank in range(2 * int(tasks)):
        assert_equal(read(runs, rank), alone(backend))
