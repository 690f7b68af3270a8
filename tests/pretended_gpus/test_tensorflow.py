"""TensorFlow on pretended GPUs: what a line does that only runs there."""

import json

import pytest

from tests.pretended_gpus.common import run
from tests.pretended_gpus.conditions import unseen

TRAINING = "tests.pretended_gpus.training"


def test_sums_that_one_replica_alone_uses_do_not_wait_for_ever(tmp_path):
    """NCCL's sum waits for each device, and TensorFlow left those out that nothing needed."""
    run("-m", TRAINING, tmp_path, "unused_sums", "types", engine="tensorflow", devices=2)


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["everything", "branches", "resumed"])
def test_everything_else_leaves_what_one_device_leaves(case, tmp_path):
    run("-m", TRAINING, tmp_path, case, engine="tensorflow")


@pytest.mark.thorough
def test_doctor_tests_the_devices_in_pairs():
    said = run("-m", "lockstep", "doctor", "--devices", engine="tensorflow", devices=2)
    assert "1 pair of devices tested" in " ".join(said.split()), said


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
    said = run("-c", script, engine="tensorflow", CUDA_VISIBLE_DEVICES=visible)
    assert json.loads(said.strip().splitlines()[-1]) == found


NOT_REACHED: dict[str, str] = {}
"""Where conditions are that no program here reaches, and why."""


@pytest.mark.thorough
def test_every_condition_on_devices_and_places_had_the_values_of_gpus(tmp_path):
    given = {"engine": "tensorflow", "NOTED_CONDITIONS": str(tmp_path / "notes")}
    run("-m", TRAINING, tmp_path, "everything", devices=2, **given)
    run("-m", "lockstep", "doctor", "--devices", devices=2, **given)
    script = "import keras, lockstep; keras.ops.ones(2); lockstep.devices(); lockstep.rehearse(7)"
    with pytest.raises(AssertionError, match="RehearsalTooLate"):
        run("-c", script, devices=2, **given)
    assert not unseen(tmp_path / "notes", NOT_REACHED, "engines/tensorflow/")
