"""torchrun and Open MPI start the processes of two nodes."""

import shutil
import subprocess

import pytest

from tests.launchers.two_nodes import TRAIN, assert_equal, read

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("rows", [(), ("--own-rows",)], ids=["", "own rows"])
def test_torchrun_trains_on_two_nodes_what_one_device_trains(rows, nodes, alone, tmp_path):
    meets = ("--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500", "--rdzv-id=1")
    options = ("--nnodes=2", "--nproc-per-node=1", *meets, TRAIN, "--folder", tmp_path, *rows)
    more = {"KERAS_BACKEND": "torch", "LOCKSTEP_REHEARSE": "1"}
    hosts = ("node1", "node2")
    started = [nodes.start("torchrun", *options, at=host, **more) for host in hosts]
    said = [nodes.end_of(each, 300) for each in started]
    assert not any(each.returncode for each in started), said
    out = "".join(out for out, _ in said)
    assert {f"process {rank} of 2 on node" for rank in (0, 1)} <= {
        line[:-1] for line in out.splitlines()
    }
    assert out.count("torch, 2 devices") == 1
    for rank in (0, 1):
        assert_equal(read(tmp_path, rank), alone("torch", *rows))


REMOTE = """#!/bin/bash
# What ssh is for mpirun: a shell in the node of this name.
while [[ $1 == -* ]]; do shift; done
node=$1
shift
exec nsenter --target "$(cat "/run/$node")" --net --uts sh -c "$*"
"""


@pytest.fixture
def mpirun(nodes, tmp_path):
    """A function that runs the training in two processes of Open MPI, from a host."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is missing (apt-get install openmpi-bin)")
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True)
    if "Open MPI) 4" not in version.stdout:
        pytest.skip("the options are those of Open MPI 4")
    remote = tmp_path / "remote"
    remote.write_text(REMOTE)
    remote.chmod(0o755)
    parameters = {"plm": "rsh", "plm_rsh_agent": remote, "ras": "^slurm"}
    options = [word for name, value in parameters.items() for word in ("--mca", name, value)]
    variables = ("PATH", "PYTHONPATH", "KERAS_BACKEND", "LOCKSTEP_REHEARSE", "OMP_NUM_THREADS")
    given = [word for name in variables for word in ("-x", name)]

    def run(backend, *more, at):
        return nodes.run(
            *("mpirun", "--allow-run-as-root", "-n", "2", "--host", "node1,node2", *options),
            *(*given, *more, "python", TRAIN, "--folder", tmp_path),
            at=at,
            KERAS_BACKEND=backend,
            LOCKSTEP_REHEARSE="1",
            OMP_NUM_THREADS="1",
        )

    return run


COORDINATOR = ("-x", "LOCKSTEP_COORDINATOR=node1:29500")


@pytest.mark.parametrize(
    ("backend", "at", "more"), [("jax", "controller", COORDINATOR), ("torch", "node1", ())]
)
def test_mpirun_trains_on_two_nodes_what_one_device_trains(
    backend, at, more, mpirun, alone, tmp_path
):
    """From the host of process 0, it needs no address."""
    status, out, error = mpirun(backend, *more, at=at)
    assert status == 0, out + error
    assert {"process 0 of 2 on node1", "process 1 of 2 on node2"} <= {*out.splitlines()}
    assert f"{backend}, 2 devices" in out
    for rank in (0, 1):
        assert_equal(read(tmp_path, rank), alone(backend))


def test_mpirun_from_a_host_without_process_0_asks_for_the_address(mpirun):
    status, out, error = mpirun("torch", at="controller")
    assert status not in (0, 124), out + error
    assert "ProcessesDisagree: This is process 0 of 2 (Open MPI: " in error
    assert "Set LOCKSTEP_COORDINATOR=host:port in every process" in error
