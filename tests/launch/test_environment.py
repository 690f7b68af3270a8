"""The place of a process, from tables of environment variables."""

import json

import pytest

from lockstep.core.environment import (
    ALONE,
    Place,
    find_place,
    first_host,
)
from lockstep.errors import ProcessesDisagree
from lockstep.processes.shares import devices_of_process

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08],big1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_NTASKS": "3",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
OPEN_MPI_0 = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
DAEMON = "OMPI_MCA_orte_local_daemon_uri"
JAX = {
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
    "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:29500",
}
OURS = {
    "LOCKSTEP_PROCESSES": "4",
    "LOCKSTEP_PROCESS": "3",
    "LOCKSTEP_COORDINATOR": "127.0.0.1:4000",
}
OPTIONS = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}


def cluster(kind, index, **tasks):
    """What TFJob of Kubeflow, Ray and the guide of TensorFlow set."""
    return {"TF_CONFIG": json.dumps({"cluster": tasks, "task": {"type": kind, "index": index}})}


TWO = ["job-worker-0.ns.svc:2222", "job-worker-1.ns.svc:2222"]
TENSORFLOW = cluster("worker", 1, worker=TWO)

PLACES = {
    "nothing": ({}, (0, 1, None, None, None, "")),
    "lockstep": (OURS, (3, 4, None, None, "127.0.0.1:4000", "lockstep")),
    "JAX": (JAX, (1, 2, None, None, "job-node-0-0.job:29500", "JAX")),
    "torchrun": (TORCHRUN, (3, 4, 1, 2, "10.0.0.1:29501", "torchrun")),
    "torchrun, an IPv6 address": (
        {**TORCHRUN, "MASTER_ADDR": "fe80::1"},
        (3, 4, 1, 2, "[fe80::1]:29501", "torchrun"),
    ),
    "torchrun's options alone": (
        OPTIONS,
        (1, 2, 0, 1, "job-node-0-0.job:29501", "torchrun's options"),
    ),
    "torchrun and its options": (
        {**TORCHRUN, **OPTIONS},
        (3, 4, 1, 2, "10.0.0.1:29501", "torchrun"),
    ),
    "Slurm": (SLURM, (2, 3, 0, 1, "gpu07:61809", "Slurm")),
    "Slurm, on one host": (
        {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_LOCALID": "2"},
        (2, 3, 2, 3, "gpu07:61809", "Slurm"),
    ),
    "Slurm's batch script outside of srun": (
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        (0, 1, None, None, None, ""),
    ),
    "Open MPI 4": (OPEN_MPI, (1, 2, 1, 2, "10.96.0.1:62624", "Open MPI")),
    "Open MPI 4, process 0 beside mpirun": (
        {**OPEN_MPI_0, DAEMON: "1531576320.0;tcp://10.96.0.1:34911"},
        (0, 2, 0, 2, "10.96.0.1:62624", "Open MPI"),
    ),
    "TensorFlow's cluster": (
        TENSORFLOW,
        (1, 2, 0, 1, "job-worker-0.ns.svc:2222", "TensorFlow's cluster"),
    ),
    "TensorFlow's cluster, the chief first": (
        cluster("worker", 1, worker=TWO, chief=["job-chief-0.ns.svc:2222"]),
        (2, 3, 0, 1, "job-chief-0.ns.svc:2222", "TensorFlow's cluster"),
    ),
    "TensorFlow's cluster, two processes of a host": (
        cluster("worker", 2, worker=["b:1", "a:1", "a:2"]),
        (2, 3, 1, 2, "b:1", "TensorFlow's cluster"),
    ),
    "TensorFlow's cluster under Slurm": (
        {**TENSORFLOW, **SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
        (1, 2, 0, 1, "job-worker-0.ns.svc:2222", "TensorFlow's cluster"),
    ),
    "TensorFlow's cluster of one worker": (
        cluster("worker", 0, worker=["localhost:1"]),
        (0, 1, None, None, None, ""),
    ),
    "TensorFlow's cluster of nothing": (
        {"TF_CONFIG": '{"environment": "cloud"}'},
        (0, 1, None, None, None, ""),
    ),
    "torchrun on each host of Slurm": (
        {**TORCHRUN, **SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
        (3, 4, 1, 2, "10.0.0.1:29501", "torchrun"),
    ),
    "one process of torchrun": (
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"},
        (0, 1, None, None, None, ""),
    ),
    "an address of one's own": (
        {**TORCHRUN, "LOCKSTEP_COORDINATOR": "10.0.0.1:5000"},
        (3, 4, 1, 2, "10.0.0.1:5000", "torchrun"),
    ),
    "JAX's address alone is for jax.distributed.initialize": (
        {"JAX_COORDINATOR_ADDRESS": "host:1"},
        (0, 1, None, None, None, ""),
    ),
    "processes that train apart": (
        {**SLURM, "LOCKSTEP_PROCESSES": "1"},
        (0, 1, None, None, None, "lockstep"),
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_the_place_of_a_process_by_the_variables_of_its_launcher(case):
    environ, expected = PLACES[case]
    found = find_place(environ)
    got = (
        found.rank,
        found.size,
        found.local_rank,
        found.local_size,
        found.coordinator,
        found.launcher,
    )
    assert got == expected
    assert all(environ.get(name) for name in found.variables)  # what it says that it has read


REFUSED = {
    "a cluster that is no JSON": ({"TF_CONFIG": "{worker"}, "TF_CONFIG='{worker' is set, but JSON"),
    "a cluster that is a list": ({"TF_CONFIG": "[1]"}, "TF_CONFIG='[1]' is set, but JSON with"),
    "a cluster without a task": (
        {"TF_CONFIG": json.dumps({"cluster": {"worker": TWO}})},
        "its task (type None, index None) is not among its 2",
    ),
    "a worker beyond its cluster": (
        cluster("worker", 2, worker=TWO),
        "its task (type 'worker', index 2) is not among its 2",
    ),
    "a cluster of hosts without ports": (
        cluster("worker", 0, worker=["a", "b"]),
        "addresses with a port were expected",
    ),
    "a cluster with parameter servers": (
        cluster("worker", 0, worker=TWO, ps=["c:1"]),
        "TF_CONFIG has ps tasks, but lockstep supports only chief and worker tasks",
    ),
    "an evaluator": (
        cluster("evaluator", 0, worker=TWO),
        "TF_CONFIG has a task of type 'evaluator', but lockstep supports only chief and worker "
        "tasks",
    ),
    "lockstep run with a cluster that all processes are given": (
        {**OURS, **cluster("worker", 0, worker=TWO)},
        "process 3 of 4 (lockstep: LOCKSTEP_PROCESSES, LOCKSTEP_PROCESS, LOCKSTEP_COORDINATOR), "
        "and process 0 of 2 (TensorFlow's cluster: TF_CONFIG): two launchers disagree",
    ),
    "a size without a rank": (
        {"WORLD_SIZE": "4"},
        "WORLD_SIZE=4 is set, but RANK is not",
    ),
    "a rank without a size": ({"RANK": "1"}, "RANK=1 is set, but WORLD_SIZE is not"),
    "a rank beyond the size": (
        {**OURS, "LOCKSTEP_PROCESS": "4"},
        "LOCKSTEP_PROCESS=4 and LOCKSTEP_PROCESSES=4 are set",
    ),
    "no number": ({**JAX, "JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID='one' is set"),
    "an elastic number of hosts": ({**OPTIONS, "PET_NNODES": "1:4"}, "PET_NNODES='1:4' is set"),
    "no address": (
        {"WORLD_SIZE": "2", "RANK": "0"},
        "process 0 of 2 (torchrun: RANK, WORLD_SIZE), but no environment variable",
    ),
    "an address without a port": (
        {**OURS, "LOCKSTEP_COORDINATOR": "here"},
        "LOCKSTEP_COORDINATOR='here' is set",
    ),
    "no address of lockstep's own": (
        {"LOCKSTEP_PROCESSES": "2", "LOCKSTEP_PROCESS": "1"},
        "process 1 of 2 (lockstep: LOCKSTEP_PROCESSES, LOCKSTEP_PROCESS), but no environment "
        "variable",
    ),
    "two launchers": (
        {**TORCHRUN, **OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"},
        "process 3 of 4 (torchrun: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and process 0 of 2 "
        "(Open MPI: OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK): two launchers disagree",
    ),
    "Open MPI 4, process 0 on another host than mpirun": (
        {**OPEN_MPI_0, DAEMON: "1531576320.1;tcp://10.96.0.2:40327"},
        "This is process 0 of 2 (Open MPI: OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK), but no "
        "environment variable gives the address of the coordinator.\n"
        "Set LOCKSTEP_COORDINATOR=host:port",
    ),
    "two launchers with other numbers": (
        {**JAX, **SLURM},
        "process 1 of 2 (JAX: JAX_NUM_PROCESSES, JAX_PROCESS_ID, JAX_COORDINATOR_ADDRESS), and "
        "process 2 of 3 (Slurm",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused_with_both_values(case):
    environ, text = REFUSED[case]
    with pytest.raises(ProcessesDisagree) as caught:
        find_place(environ)
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_the_first_host_of_slurms_lists():
    lists = ["node1", "node1,node2", "node[001-015],other", "node[001,007-015]", "a-b[3],c"]
    assert [first_host(each) for each in lists] == ["node1", "node1", "node001", "node001", "a-b3"]


@pytest.mark.parametrize(
    ("place", "visible", "mine"),
    [
        (Place(3, 4, 1, 2), 4, [2, 3]),
        (Place(1, 2, 1, 2), 2, [1]),
        (Place(1, 2, 0, 1), 4, None),  # one process per host
        (Place(3, 4, 1, 2, divides_devices=True), 4, None),
        (Place(1, 2), 4, None),  # JAX's variables do not say who is on this host
        (Place(3, 4, 1, 2), 0, None),  # no GPU
        (ALONE, 4, None),
    ],
)
def test_processes_of_a_host_divide_its_gpus(place, visible, mine):
    assert devices_of_process(place, visible) == mine


@pytest.mark.parametrize(
    ("size", "visible", "fit"),
    [(3, "4 GPUs", "2 processes"), (4, "1 GPU", "1 process"), (2, "3 GPUs", "1 process")],
)
def test_processes_that_would_claim_the_same_gpus_are_refused(size, visible, fit):
    place = Place(0, size, 0, size, launcher="torchrun")
    with pytest.raises(ProcessesDisagree, match=f"{size} processes .* each sees {visible}:") as it:
        devices_of_process(place, int(visible.split()[0]))
    assert f"Start {fit} per host" in str(it.value)


BOUND = {
    **SLURM,
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}


@pytest.mark.parametrize(
    ("visible", "on_host", "bound"),
    [
        ("CUDA_VISIBLE_DEVICES=2,3", "4", True),  # --gpu-bind=single:2
        ("CUDA_VISIBLE_DEVICES=0,1", "4", True),  # the same, in cgroups
        ("CUDA_VISIBLE_DEVICES=1", "2", True),
        ("ROCR_VISIBLE_DEVICES=1", "2", True),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3", "4", False),
        ("CUDA_VISIBLE_DEVICES=0,1,2", "4", False),  # --gpu-bind=closest: not all are its own
        ("NOTHING=", "4", False),
    ],
)
def test_gpus_that_slurm_has_bound_to_a_task_are_its_own(visible, on_host, bound):
    """Each of two tasks took half of its own GPUs, or was told that both would claim one."""
    name, value = visible.split("=")
    place = find_place({**BOUND, name: value, "SLURM_GPUS_ON_NODE": on_host})
    assert place.divides_devices is bound
    if bound:
        assert devices_of_process(place, visible=len(value.split(","))) is None
