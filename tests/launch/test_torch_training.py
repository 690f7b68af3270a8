"""On PyTorch, one script trains the same model alone and in two processes, by any launcher."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.processes.common import clean_environment
from tests.tiers import rest

HERE = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("torch_train.py")
LOCKSTEP_RUN = [sys.executable, "-m", "lockstep", "run", "--processes", "2"]
BOUND = 1e-10


def environment():
    clean = clean_environment("KERAS_")
    return {
        **clean,
        "KERAS_BACKEND": "torch",
        "KERAS_TORCH_DEVICE": "cpu",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE / "src")]),
    }


def launch(command, folder, *arguments):
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [*command, str(SCRIPT), str(folder), *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, error = process.communicate(timeout=400)
    finally:
        process.kill()
    return process.returncode, out, error


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """What stock Keras gives on one device."""
    folder = tmp_path_factory.mktemp("truth") / "alone"
    status, out, error = launch([sys.executable], folder)
    assert status == 0, out + error
    return found(folder, 0)


def found(folder, rank):
    with np.load(folder.parent / f"{folder.name}-{rank}.npz") as arrays:
        return list(arrays.values())


def assert_trained(folder, truth, out):
    first, second = found(folder, 0), found(folder, 1)
    for mine, other, expected in zip(first, second, truth, strict=True):
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_allclose(mine, expected, rtol=0, atol=BOUND)
    assert out.count("Epoch 3/3") == 1  # one process has shown its progress
    assert_written(folder)


def assert_written(folder):
    """One process has written, each epoch once."""
    written = {file.name for file in folder.iterdir()} - {"failed"}
    assert written == {"model.keras", "checkpoints", "log.csv"}
    assert len((folder / "log.csv").read_text().splitlines()) == 4


@pytest.mark.whole
def test_two_processes_of_torchrun_train_what_one_device_trains(tmp_path, truth):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    status, out, error = launch([*command, "--master-port", port], tmp_path / "two")
    assert status == 0, out + error
    assert f"lockstep: 2 processes connect at 127.0.0.1:{int(port) + 1} (torchrun: RANK," in error
    assert out.count("lockstep: torch, 2 devices") == 1
    assert_trained(tmp_path / "two", truth, out)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "at", "words"),
    [
        ("killed", 1, "process 1 of 2 failed first: ended by SIGKILL"),
        *rest(
            ("raises", 0, "process 0 of 2 failed first: OSError: the disk is full"),
            # It does not wait for the other one, which waits for it within a step.
            ("told to leave, then raises", 1, "process 1 of 2 failed first: exit status 143"),
        ),
    ],
)
def test_two_processes_train_what_one_device_trains_after_a_fault_of_one(
    fault, at, words, tmp_path, truth
):
    command = [*LOCKSTEP_RUN, "--restarts", "1"]
    status, out, error = launch(command, tmp_path / "two", fault, str(at))
    assert status == 0, out + error
    assert words in error
    assert "lockstep: resumes from" in out
    assert_trained(tmp_path / "two", truth, out)


@pytest.mark.whole
def test_sigterm_to_one_process_saves_and_ends_all_after_the_same_step(tmp_path, truth):
    status, out, error = launch(LOCKSTEP_RUN, tmp_path / "two", "told to leave", "1")
    assert status == 143, out + error
    assert "process 1 of 2 failed first" in error or "process 0 of 2 failed first" in error
    assert "lockstep: saved epoch 2, after step 4 to" in out, out + error  # it came in step 3
    assert "trained by process" not in out
    status, out, error = launch(LOCKSTEP_RUN, tmp_path / "two", "told to leave", "1")
    assert status == 0, out + error
    assert "lockstep: resumes from" in out
    assert_trained(tmp_path / "two", truth, out)


DISAGREE = "torch_disagree.py"
WHAT_DIFFERS = {
    "other_rows": "Process 1 has a different first batch",
    "other_last_rows": "In one of the 6 batches of this epoch, process 1 had different rows",
    "other_number_of_rows": "Process 1 has a different first batch, or a different number",
    "fewer_batches": "Process 1 ends after 3 batches, but process 0 has more",
    "assigned_by_one": "Process 1 has assigned different values to variables than process 0",
    "an_error_in_a_step": "Process 1 left its fit with an error",
    "another_plan": "Process 1 runs different layers of",
    "another_batch_by_hand": "Process 1 has a different batch than process 0 in the data of its",
    "another_late_row_by_hand": "Process 1 has a different batch than process 0 in the data of its",
    "another_model": "Process 1 has 2 variables with 28 numbers, but process 0 has 2 with 21",
}


def in_two_processes(script, *arguments):
    """What both processes of a script have printed; neither has failed."""
    return in_processes(2, script, *arguments)


def in_processes(count, script, *arguments, patience=5):
    """What each process of a script has printed; none has failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    names = {"PROCESSES": str(count), "COORDINATOR": address, "PATIENCE": str(patience)}
    ours = {f"LOCKSTEP_{name}": value for name, value in names.items()}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name(script)), *arguments],
            env={**environment(), **ours, "LOCKSTEP_PROCESS": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=400) for process in running]
    finally:
        for process in running:
            process.kill()
    for (out, error), process in zip(said, running, strict=True):
        assert process.returncode == 0, out + error
        assert out.splitlines()[-1] == "the end"
    return [out.splitlines()[:-1] for out, _ in said]


@pytest.mark.whole
def test_models_and_data_of_many_kinds(tmp_path):
    script = Path(__file__).with_name("torch_cases.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "alone")]
    subprocess.run(command, env=environment(), check=True, timeout=300)
    in_two_processes("torch_cases.py", str(tmp_path / "two"))
    names = ("alone-0", "two-0", "two-1")
    alone, first, second = (np.load(tmp_path / f"{name}.npz") for name in names)
    assert len({name.split()[0] for name in alone.files}) == 12
    for name in alone.files:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        np.testing.assert_allclose(first[name], alone[name], rtol=0, atol=BOUND, err_msg=name)


@pytest.mark.whole
def test_every_process_verifies_the_model_of_the_first():
    """Dropout draws as on one device. A layer that is wrongly declared row by row is found."""
    first, second = in_two_processes("torch_verify.py")
    assert first == second
    assert first[0] == "equal 2 None"
    assert first[1] == "different 2 sequential_1/centred"


@pytest.mark.whole
def test_processes_that_differ_are_told_in_words_and_can_go_on():
    met = [dict(line.split(": ", 1) for line in lines) for lines in in_two_processes(DISAGREE)]
    for case, words in WHAT_DIFFERS.items():
        assert met[0][case].startswith(f"ProcessesDisagree: {words}"), met[0][case]
        raised = "KeyError" if case == "an_error_in_a_step" else "ProcessesDisagree"
        assert met[1][case].startswith(raised), met[1][case]
    # Both wait. The one that gives up first ends the call of the other.
    waited, left = "has waited 5 seconds in", "left its"
    of_both = [process["another_call"] for process in met]
    assert any(waited in words for words in of_both), of_both
    assert all(waited in words or left in words for words in of_both), of_both


@pytest.mark.whole
def test_a_process_of_several_devices_is_refused(tmp_path):
    command = [*LOCKSTEP_RUN, "--devices-per-process", "2"]
    status, _, error = launch(command, tmp_path / "two")
    assert status == 1
    assert "and it has 2 devices, but on 'torch' each process trains on one." in error
    assert "Start 4 processes" in error
