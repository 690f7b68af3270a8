"""torchrun and Open MPI start the processes of two nodes."""

import shutil
import subprocess

import pytest

from tests.launchers.test_slurm import (  # noqa: F401  (fixtures)
    BACKENDS,
    TRAIN,
    alone,
    assert_equal,
    nodes,
    read,
)

pytestmark = pytest.mark.thorough


def test_torchrun_trains_on_two_nodes_what_one_device_trains(nodes, alone, tmp_path):  # noqa: F811
    meets = ("--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500", "--rdzv-id=1")
    options = ("--nnodes=2", "--nproc-per-node=1", *meets, TRAIN, "--folder", tmp_path)
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
        assert_equal(read(tmp_path, rank), alone("torch"))


REMOTE = """#!/bin/bash
# What ssh is for mpirun: a shell in the node of this name.
while [[ $1 == -* ]]; do shift; done
node=$1
shift
exec nsenter --target "$(cat "/run/$node")" --net --uts sh -c "$*"
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="apt-get install openmpi-bin")
def test_mpirun_trains_on_two_nodes_what_one_device_trains(backend, nodes, alone, tmp_path):  # noqa: F811
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True)
    if "Open MPI) 4" not in version.stdout:
        pytest.skip("the options below are those of Open MPI 4")
    remote = tmp_path / "remote"
    remote.write_text(REMOTE)
    remote.chmod(0o755)
    parameters = {"plm": "rsh", "plm_rsh_agent": remote, "ras": "^slurm", "btl": "tcp,self"}
    options = [word for name, value in parameters.items() for word in ("--mca", name, value)]
    variables = ("PATH", "PYTHONPATH", "KERAS_BACKEND", "LOCKSTEP_REHEARSE", "OMP_NUM_THREADS")
    given = [word for name in variables for word in ("-x", name)]
    status, out, error = nodes.run(
        *("mpirun", "--allow-run-as-root", "-n", "2", "--host", "node1,node2", *options, *given),
        *("python", TRAIN, "--folder", tmp_path),
        KERAS_BACKEND=backend,
        LOCKSTEP_REHEARSE="1",
        OMP_NUM_THREADS="1",
    )
    assert status == 0, out + error
    assert {"process 0 of 2 on node1", "process 1 of 2 on node2"} <= {*out.splitlines()}
    assert f"{backend}, 2 devices" in out
    for rank in (0, 1):
        assert_equal(read(tmp_path, rank), alone(backend))
