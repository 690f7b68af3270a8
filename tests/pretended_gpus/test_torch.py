"""PyTorch on pretended GPUs: what a line does that only runs there."""

import json

import pytest

from tests.pretended_gpus.common import run
from tests.pretended_gpus.conditions import unseen

TRAINING = "tests.pretended_gpus.training"


def last_line(said):
    return json.loads(said.strip().splitlines()[-1])


def test_two_gpus_leave_what_one_device_leaves(tmp_path):
    cases = ["everything", "checkpointed", "penalty"]
    run("-m", TRAINING, tmp_path, *cases, engine="torch", devices=2)


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["everything", "sharded", "micro_batches", "branches", "resumed"])
def test_several_gpus_leave_what_one_device_leaves(case, tmp_path):
    devices = 4 if case == "everything" else 3
    run("-m", TRAINING, tmp_path, case, engine="torch", devices=devices)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "cases", [["everything", "checkpointed"], ["without_call"], ["sharded", "micro_batches"]]
)
def test_processes_with_a_gpu_each_leave_what_one_device_leaves(cases, tmp_path):
    run("-m", TRAINING, tmp_path, *cases, engine="torch", devices=1, processes=2)


def test_a_process_of_torchrun_builds_its_model_on_its_own_gpu():
    """All processes of a host built it on the first GPU, where the script builds it first."""
    script = """
import json, lockstep
from lockstep.engines.torch.exchange import accelerators
print(json.dumps(accelerators.cuda.current_device()))
"""
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert last_line(run("-c", script, engine="torch", devices=2, **torchrun)) == 1
    on_cpu = {**torchrun, "LOCKSTEP_REHEARSE": "1"}
    assert last_line(run("-c", script, engine="torch", devices=2, **on_cpu)) == 0


@pytest.mark.thorough
def test_doctor_tests_the_devices_in_pairs():
    """`torch.cuda.comm`, which summed them, is no part of PyTorch."""
    said = run("-m", "lockstep", "doctor", "--devices", engine="torch", devices=2)
    assert "1 pair of devices tested" in " ".join(said.split()), said


@pytest.mark.thorough
def test_lockstep_run_gives_each_process_its_gpus(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    said = run("-m", "lockstep", "run", "--processes", 2, file, engine="torch", devices=2)
    assert "gpu:0, gpu:1" in said
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


SCRIPT = """
import pathlib, os, keras, numpy as np, lockstep
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
lockstep.distribute(model)
x = np.ones((8, 3))
model.fit(x, x[:, :2], verbose=2)
rank = os.environ["LOCKSTEP_PROCESS"]
visible = os.environ["CUDA_VISIBLE_DEVICES"]
assert visible == rank, visible
file = pathlib.Path(__file__).parent / rank
file.write_text(repr([weight.tolist() for weight in model.get_weights()]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("", ["cpu:0"]),
        ("9", ["cpu:0"]),
        ("2,9,1", ["gpu:0", "cpu:0"]),
        ("3,1", ["gpu:0", "gpu:1", "cpu:0"]),
    ],
)
def test_the_devices_are_those_that_cuda_visible_devices_names(visible, found):
    script = "import json, lockstep; print(json.dumps(lockstep.devices()))"
    assert last_line(run("-c", script, engine="torch", CUDA_VISIBLE_DEVICES=visible)) == found


DIES = """
import os, keras, numpy as np, lockstep
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
lockstep.distribute(model)
x = np.ones((64, 3))

class Dies(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and os.environ["LOCKSTEP_PROCESS"] == "1":
            os._exit(0)

try:
    model.fit(x, x[:, :2], batch_size=8, verbose=0, callbacks=[Dies()])
except lockstep.errors.ProcessesDisagree as error:
    print(error)
"""


@pytest.mark.thorough
def test_a_process_that_ends_in_a_fit_is_an_error_in_the_others():
    """NCCL waited for it until LOCKSTEP_PATIENCE was over, and so did the agreement on batches."""
    said = run("-c", DIES, engine="torch", devices=1, processes=2, LOCKSTEP_PATIENCE="9999")
    assert "process 0 continues, but a step needs every process" in said


REFUSED = """
import json, keras, lockstep
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
try:
    lockstep.distribute(model)
except lockstep.errors.LockstepError as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def test_more_processes_than_gpus_are_refused():
    said = run(
        "-c",
        REFUSED,
        engine="torch",
        devices=1,
        processes=1,
        RANK="0",
        WORLD_SIZE="2",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
    assert "2 processes run on this host (torchrun), and each sees 1 GPU" in last_line(said)


def test_gpus_without_nccl_are_refused():
    said = last_line(run("-c", REFUSED, engine="torch", devices=2, PRETENDED_NO_NCCL="1"))
    assert said.startswith("UnsupportedBackend: Several GPUs were requested on 'torch'")
    assert "has no NCCL" in said


@pytest.mark.thorough
def test_one_gpu_is_two_devices(tmp_path):
    """With NCCL, and without it over the memory of the host."""
    for without in ({}, {"PRETENDED_NO_NCCL": "1"}):
        shared = {"LOCKSTEP_SHARE_GPU": "2", **without}
        said = run("-m", TRAINING, tmp_path, "everything", engine="torch", devices=1, **shared)
        assert "takes 0.50 of its GPU" in said


@pytest.mark.thorough
def test_a_gpu_is_not_shared_by_an_old_nccl():
    old = {"LOCKSTEP_SHARE_GPU": "2", "PRETENDED_NCCL": "2.27.3"}
    said = last_line(run("-c", REFUSED, engine="torch", devices=1, **old))
    assert (
        "LOCKSTEP_SHARE_GPU=2 was set, but NCCL 2.27.3 is installed, but 2.30 or later is needed"
    ) in said
    said = last_line(run("-c", REFUSED, engine="torch", devices=2, **old))
    assert "makes 2 devices out of one GPU, but 2 GPUs are visible" in said
    said = last_line(run("-c", REFUSED, engine="torch", devices=0, **old))
    assert "but 0 GPUs are visible" in said


NOT_REACHED = {
    "engines/torch/same_model/settings.py checksum": "tensors of a pretended GPU are on the CPU",
}
"""Where conditions are that no program here reaches, and why."""


@pytest.mark.thorough
def test_every_condition_on_devices_and_places_had_the_values_of_gpus(tmp_path):
    given = {"engine": "torch", "NOTED_CONDITIONS": str(tmp_path / "notes")}
    cases = ["everything", "checkpointed", "micro_batches", "branches", "resumed"]
    run("-m", TRAINING, tmp_path, *cases, devices=2, **given)
    run("-m", TRAINING, tmp_path, "everything", devices=1, processes=2, **given)
    run("-m", "lockstep", "doctor", "--devices", "--train", devices=2, **given)
    run("-c", REFUSED, devices=2, **given, PRETENDED_NO_NCCL="1")
    run("-c", REFUSED, devices=2, **given, LOCKSTEP_REHEARSE="2")
    assert not unseen(tmp_path / "notes", NOT_REACHED, "engines/torch/")
