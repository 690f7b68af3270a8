"""Runs on a Ray cluster of two nodes, which are on this machine."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.cli import main
from lockstep.launch.environment import find_place
from lockstep.launch.ray_run import passed_on
from lockstep.launch.shares import place_of_each
from lockstep.package_versions import install_command
from tests.launch.test_run import HEAD, none_left, pids, wait_until
from tests.launch.test_training import SCRIPT, assert_one_set, assert_trained, truth  # noqa: F401
from tests.launch.two_ray_nodes import SOON, Cluster, clean_environment
from tests.sampling import rest

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def cluster():
    made = Cluster()
    yield made
    made.end()


def launch(cluster, command, folder, **environment):
    more = {
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "KERAS_BACKEND": "jax",
        "LOCKSTEP_REHEARSE": "2",
        "RAY_ADDRESS": cluster.address,
        "RAY_DEDUP_LOGS": "0",
    }
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={**clean_environment(), **more, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch_script(cluster, body, folder, *options, **environment):
    (folder / "script.py").write_text(HEAD + body)
    command = ["-m", "lockstep", "run", "--on", "ray", *options, "script.py"]
    return launch(cluster, command, folder, **environment)


def end_of(process):
    try:
        out, error = process.communicate(timeout=SOON)
    finally:
        process.kill()
    return process.returncode, out, error


def numbered(out):
    """The lines that Ray has forwarded: the number of the process, and what it has printed."""
    found = (re.match(r"\(process (\d+) [^)]*\) (.*)", line) for line in plain(out).splitlines())
    return [(int(each[1]), each[2]) for each in found if each]


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.whole
def test_a_run_goes_on_with_the_numbers_of_one_device_when_a_node_is_lost(
    cluster,
    tmp_path,
    truth,  # noqa: F811
):
    run = ["-m", "lockstep", "run", "--on", "ray", "--nodes", "2", "--restarts", "1"]
    process = launch(cluster, [*run, str(SCRIPT), str(tmp_path), "waits", "1"], tmp_path)
    wait_until(lambda: (tmp_path / "failed").exists() or process.poll() is not None, SOON)
    cluster.remove_node()
    cluster.add_node()
    status, out, error = end_of(process)
    assert status == 0, out + error
    assert error.count("Ray, 2 nodes: ") == 2
    assert "process 1 of 2 failed first: the process on the node" in error, error
    assert out.count("jax, 4 devices") == 2
    assert "lockstep: goes on from" in out
    assert_trained(tmp_path, truth)
    assert_one_set(tmp_path, out)


@pytest.mark.parametrize("how", [signal.SIGTERM, *rest(signal.SIGKILL)])
def test_the_end_of_the_launcher_ends_the_processes_and_what_they_have_started(
    how, cluster, tmp_path
):
    """After SIGTERM they save first."""
    body = """
def save(number, _):
    Path(f"saved-{rank}").write_text(str(number))
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(f"pid-worker-{rank}").write_text(str(worker.pid))
print("ready", rank, Path.cwd().name, sys.argv[1:])
while True:
    time.sleep(0.1)
"""
    process = launch_script(cluster, body, tmp_path, "--nodes", "2")
    wait_until(lambda: len(pids(tmp_path)) == 4)
    if how == signal.SIGTERM:
        wait_until(lambda: "ready" in process.stdout.readline())
    process.send_signal(how)
    status, _, error = end_of(process)
    assert len(none_left(tmp_path)) == 4
    if how == signal.SIGTERM:
        assert status == 128 + how, error
        assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["15", "15"]
        assert "failed" not in error


SEEN = {
    "jax": ["2 0,1 data"] * 2,
    "torch": ["4 0 data", "4 0 data", "4 1 data", "4 1 data"],  # a process for each GPU
}


@pytest.mark.parametrize("backend", SEEN)
def test_a_process_sees_the_gpus_that_ray_gives_it_and_the_folder_that_ray_copies(
    backend, cluster, tmp_path
):
    body = f"""
gpus, size = os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCKSTEP_PROCESSES"]
print(size, gpus, Path("data.txt").read_text())
assert Path.cwd() != Path({str(tmp_path)!r})
"""
    (tmp_path / "data.txt").write_text("data")
    options = ("--nodes", "2", "--working-dir", str(tmp_path))
    given = {"LOCKSTEP_REHEARSE": "", "KERAS_BACKEND": backend}
    status, out, error = end_of(launch_script(cluster, body, tmp_path, *options, **given))
    assert status == 0, out + error
    assert sorted(line for _, line in numbered(out)) == SEEN[backend]
    assert sorted(rank for rank, _ in numbered(out)) == [*range(len(SEEN[backend]))]
    assert "Ray, 2 nodes with 2 GPUs each: " in error


FUNCTIONS = """
import lockstep.ray

def place():
    import os

    print("out", os.environ["LOCKSTEP_PROCESS"], os.environ["CUDA_VISIBLE_DEVICES"] or "no GPU")
    return ("value", os.environ["LOCKSTEP_PROCESS"])

def fails():
    import os

    if os.environ["LOCKSTEP_PROCESS"] == "1":
        raise FileNotFoundError(2, "no such thing")

if __name__ == "__main__":
    print(lockstep.ray.run(place, nodes=2))
    try:
        lockstep.ray.run(fails, nodes=2)
    except lockstep.errors.LaunchError as error:
        print(error)
        print(repr(error.__cause__))
    try:
        lockstep.ray.run(lambda: iter(x for x in ()), nodes=2)
    except lockstep.errors.LaunchError as error:
        print(error)
"""


def test_a_function_returns_its_value_and_its_exception_comes_home(cluster, tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    status, out, error = end_of(launch(cluster, ["functions.py"], tmp_path))
    assert status == 0, out + error
    lines = out.splitlines()
    assert {(0, "out 0 no GPU"), (1, "out 1 no GPU")} <= set(numbered(out))
    assert "('value', '0')" in lines
    words = "FileNotFoundError: [Errno 2] no such thing"
    assert f"fails failed in process 1 of 2: {words}." in lines
    assert "FileNotFoundError(2, 'no such thing')" in lines
    assert (1, words) in numbered(error)  # the end of the traceback
    assert any(line.startswith("<lambda> failed in process 0 of 2: TypeError") for line in lines)


def test_more_nodes_than_there_are_are_refused_with_those_that_are_there(cluster, tmp_path):
    (tmp_path / "impatient.py").write_text(
        "from lockstep.cli import main\n"
        "from lockstep.launch import ray_run\n"
        "ray_run.STARTS_WITHIN = 2.0\n"
        "main(['run', '--on', 'ray', '--nodes', '3', __file__])\n"
    )
    status, _, error = end_of(launch(cluster, ["impatient.py"], tmp_path))
    assert status == 1
    assert "3 nodes of Ray: no room within 2 s. Alive are: " in error
    assert error.count("(2 GPUs)") == 2


def test_a_dry_run_says_what_it_would_take_and_starts_nothing(cluster, tmp_path):
    options = ("--nodes", "2", "--dry-run")
    process = launch_script(cluster, "", tmp_path, *options, LOCKSTEP_REHEARSE="")
    status, _, error = end_of(process)
    assert status == 0
    assert "Ray, 2 nodes with 2 GPUs each, would run: python script.py" in error
    assert not pids(tmp_path)


def test_what_cannot_be_reached_or_is_not_copied_is_refused_in_words(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("")
    Path("other").mkdir()

    def refusal(*options):
        done = CliRunner().invoke(main, ["run", "--on", *options])
        assert done.exit_code == 1
        assert len(done.output.strip().splitlines()) <= 3
        return done.output

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"ray://127.0.0.1:{silent.getsockname()[1]}"
        assert f"No server at {address}, the address of Ray: [Errno 111]" in refusal(
            address, "script.py"
        )
    assert "none.py was to be run, and there is no such file in" in refusal("ray", "none.py")
    said = refusal("ray", "--working-dir", "other", "script.py")
    assert "--working-dir=other is copied to the nodes, and script.py is not in it" in said
    monkeypatch.setitem(sys.modules, "ray", None)
    assert f"Install it: {install_command('ray')}" in refusal("ray", "script.py")


def test_a_process_on_a_node_knows_its_place_and_no_other_launcher_of_its_cluster():
    """Slurm has started the three nodes of a cluster, and Ray the launcher on the second one."""
    slurm = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1", "KERAS_BACKEND": "jax", "HOME": "/"}
    given = passed_on({**slurm, "LOCKSTEP_REHEARSE": "2", "LOCKSTEP_JOINED": "7"})
    assert given == {"KERAS_BACKEND": "jax", "LOCKSTEP_REHEARSE": "2"}
    place = find_place({**given, **place_of_each(2, "10.0.0.1:5000")[1]})
    assert (place.rank, place.size, place.coordinator) == (1, 2, "10.0.0.1:5000")
    assert (place.local_rank, place.local_size) == (0, 1)
