"""Runs on a Ray cluster of two nodes, which are on this machine."""

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from lockstep.cli import main
from lockstep.errors import LaunchError
from lockstep.launch import ray_cluster
from lockstep.launch.environment import find_place
from lockstep.launch.ray_node import NodeProcess
from lockstep.launch.ray_nodes import Node, Nodes, Share, share_of
from lockstep.launch.ray_run import passed_on
from lockstep.launch.shares import place_of_each
from lockstep.package_versions import install_command
from tests.launch.test_run import HEAD, none_left, pids, wait_until
from tests.launch.test_training import SCRIPT, assert_one_set, assert_trained, truth  # noqa: F401
from tests.launch.two_ray_nodes import SOON, Cluster, clean_environment

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


def test_a_run_goes_on_with_the_numbers_of_one_device_when_a_node_is_lost(
    cluster,
    tmp_path,
    truth,  # noqa: F811
):
    run = ["-m", "lockstep", "run", "--on", "ray", "--nodes", "1:2", "--restarts", "1"]
    process = launch(cluster, [*run, str(SCRIPT), str(tmp_path), "waits", "1"], tmp_path)
    wait_until(lambda: (tmp_path / "failed").exists() or process.poll() is not None)
    cluster.remove_node()
    try:
        status, out, error = end_of(process)
    finally:
        cluster.add_node()
    assert status == 0, out + error
    assert "Ray, 2 nodes with 1 CPU each: " in error
    assert "of 2 failed first: the node" in error
    assert "Ray, 1 node with 1 CPU: " in error
    assert "jax, 4 devices" in out
    assert "lockstep: goes on from" in out
    assert "jax, 2 devices" in out
    assert_trained(tmp_path, truth)
    assert_one_set(tmp_path, out)


def test_two_nodes_train_what_one_device_trains(cluster, tmp_path, truth):  # noqa: F811
    run = ["-m", "lockstep", "run", "--on", "ray", "--nodes", "2"]
    status, out, error = end_of(launch(cluster, [*run, str(SCRIPT), str(tmp_path)], tmp_path))
    assert status == 0, out + error
    assert "jax, 4 devices" in out
    assert "restart" not in error
    assert_trained(tmp_path, truth)
    assert_one_set(tmp_path, out)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
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
        wait_until(lambda: process.stdout.readline().startswith("ready 0"))
    process.send_signal(how)
    status, _, error = end_of(process)
    assert len(none_left(tmp_path)) == 4
    if how == signal.SIGTERM:
        assert status == 128 + how, error
        assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["15", "15"]
        assert "failed" not in error


def test_a_process_sees_the_gpus_that_ray_gives_it_and_the_folder_that_ray_copies(
    cluster, tmp_path
):
    body = f"""
print("sees", rank, os.environ["CUDA_VISIBLE_DEVICES"], Path("data.txt").read_text())
assert Path.cwd() != Path({str(tmp_path)!r})
"""
    (tmp_path / "data.txt").write_text("data")
    options = ("--nodes", "2", "--working-dir", str(tmp_path))
    process = launch_script(cluster, body, tmp_path, *options, LOCKSTEP_REHEARSE="")
    status, out, error = end_of(process)
    assert status == 0, out + error
    assert {"sees 0 0,1 data", "[1] sees 1 0,1 data"} == set(out.splitlines())
    assert "Ray, 2 nodes with 2 GPUs each: " in error


def test_on_pytorch_each_gpu_of_a_node_has_a_process(cluster, tmp_path):
    body = """
print("sees", rank, os.environ["LOCKSTEP_PROCESSES"], os.environ["CUDA_VISIBLE_DEVICES"])
"""
    options = {"LOCKSTEP_REHEARSE": "", "KERAS_BACKEND": "torch"}
    process = launch_script(cluster, body, tmp_path, "--nodes", "2", **options)
    status, out, error = end_of(process)
    assert status == 0, out + error
    seen = [line.partition("sees ")[2].split() for line in out.splitlines()]
    assert sorted(rank for rank, _, _ in seen) == ["0", "1", "2", "3"]
    assert {count for _, count, _ in seen} == {"4"}
    assert sorted(gpu for _, _, gpu in seen) == ["0", "0", "1", "1"]


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
    assert {"out 0 no GPU", "[1] out 1 no GPU", "('value', '0')"} <= set(lines)
    words = "FileNotFoundError: [Errno 2] no such thing"
    assert f"fails failed in process 1 of 2: {words}." in lines
    assert "FileNotFoundError(2, 'no such thing')" in lines
    assert f"    {words}" in error.splitlines()  # the end of the traceback
    assert any(line.startswith("<lambda> failed in process 0 of 2: TypeError") for line in lines)


def test_more_nodes_than_there_are_are_refused_with_those_that_are_there(cluster, tmp_path):
    status, _, error = end_of(launch_script(cluster, "", tmp_path, "--nodes", "3"))
    assert status == 1
    assert "--nodes=3 was asked for, and the Ray cluster has 2 nodes: " in error
    assert error.count("(2 GPUs, 1 CPU)") == 2
    assert len(error.strip().splitlines()) <= 3


def test_an_address_without_ray_is_refused_in_words(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("")
    monkeypatch.setattr(ray_cluster, "_ANSWERS_WITHIN", 0.2)
    # It is not asked for more: it may wait without an end.
    ray = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)

    def answer(web):
        connection, _ = web.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.recv(100)

    def refusal(address):
        done = CliRunner().invoke(main, ["run", "--on", address, "script.py"])
        assert done.exit_code == 1
        assert len(done.output.strip().splitlines()) <= 3
        return done.output

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"ray://127.0.0.1:{silent.getsockname()[1]}"
        assert f"Nobody answers at {address}, the address of Ray: [Errno 111]" in refusal(address)
        silent.listen()
        assert f"Nobody answers at {address}, the address of Ray: nothing wi" in refusal(address)
    with socket.create_server(("127.0.0.1", 0)) as web:
        address = f"ray://127.0.0.1:{web.getsockname()[1]}"
        answering = threading.Thread(target=answer, args=[web])
        answering.start()
        assert f"What answers at {address} is no Ray." in refusal(address)
        answering.join()
    assert "ray://host was given as the address of Ray, and it has no port" in refusal("ray://host")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert f"Install it: {install_command('ray')}" in refusal("ray")


def test_a_script_that_is_not_there_or_not_copied_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("")
    Path("other").mkdir()
    done = CliRunner().invoke(main, ["run", "--on", "ray", "none.py"])
    assert "none.py was to be run, and there is no such file in" in done.output
    done = CliRunner().invoke(main, ["run", "--on", "ray", "--working-dir", "other", "script.py"])
    assert "--working-dir=other is copied to the nodes, and script.py is not in it" in done.output


def test_a_node_says_what_it_does_not_have(tmp_path):
    here, script = str(tmp_path), "script.py"
    assert NodeProcess.missing(here, script) == f"file {tmp_path / script}"
    assert NodeProcess.missing(str(tmp_path / "no"), script) == f"folder {tmp_path / 'no'}"
    (tmp_path / script).touch()
    assert NodeProcess.missing(here, script) is None


GPU_8, GPU_8_TOO, GPU_4 = Node("a", "a", 8, 32), Node("b", "b", 8, 32), Node("c", "c", 4, 32)
CPU_2, CPU_9 = Node("d", "d", 0, 2), Node("e", "e", 0, 9)
SHARES = {
    "the GPUs of the nodes that have some": ([CPU_9, GPU_8, GPU_8_TOO], "2", None, (2, 8, 0)),
    "the largest nodes": ([GPU_4, GPU_8, GPU_8_TOO], "2", None, (2, 8, 0)),
    "as many GPUs as are asked for": ([GPU_4, GPU_8, GPU_8_TOO], "3", 4, (3, 4, 0)),
    "CPUs on request": ([GPU_4, GPU_8], "2", 0, (2, 0, 32)),
    "as many CPUs as the smallest has": ([CPU_2, CPU_9], "2", None, (2, 0, 2)),
    "as many nodes as there are": ([CPU_2, CPU_9], "1:4", None, (2, 0, 2)),
}


@pytest.mark.parametrize("case", SHARES)
def test_what_a_run_takes_of_the_nodes(case):
    nodes, asked, gpus, share = SHARES[case]
    least, _, most = asked.partition(":")
    assert share_of(nodes, Nodes(int(least), int(most or least)), gpus) == Share(*share)


def test_a_process_for_each_gpu():
    share = share_of([GPU_8, GPU_8_TOO], Nodes(2, 2), 4, one_gpu_each=True)
    assert share == Share(2, 4, 0, each=4)
    assert share.bundle == {"GPU": 4}


def test_nodes_of_different_sizes_and_too_few_are_refused_in_words():
    with pytest.raises(LaunchError) as error:
        share_of([GPU_8, GPU_4, CPU_2], Nodes(2, 2), None)
    assert str(error.value) == (
        "--nodes=2 was asked for, and the nodes have different numbers of GPUs: "
        "a (8 GPUs, 32 CPUs), c (4 GPUs, 32 CPUs), d (2 CPUs).\n"
        "Take 4 of each with --gpus-per-node 4, or fewer nodes."
    )
    with pytest.raises(LaunchError, match="the Ray cluster has 1 node with 8 GPUs: a"):
        share_of([GPU_8, GPU_4], Nodes(2, 4), 8)
    with pytest.raises(LaunchError, match="the Ray cluster has 0 nodes: none"):
        share_of([], Nodes(1, 4), None)


def test_a_process_on_a_node_knows_its_place_and_no_other_launcher_of_its_cluster():
    """Slurm has started the three nodes of a cluster, and Ray the launcher on the second one."""
    slurm = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1", "KERAS_BACKEND": "jax", "HOME": "/"}
    given = passed_on({**slurm, "LOCKSTEP_REHEARSE": "2", "LOCKSTEP_JOINED": "7"})
    assert given == {"KERAS_BACKEND": "jax", "LOCKSTEP_REHEARSE": "2"}
    place = find_place({**given, **place_of_each(2, "10.0.0.1:5000")[1]})
    assert (place.rank, place.size, place.coordinator) == (1, 2, "10.0.0.1:5000")
    assert (place.local_rank, place.local_size) == (0, 1)
