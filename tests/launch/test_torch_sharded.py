"""On PyTorch, each of several processes has a part of a model that trains as on one device."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_torch_training import environment, in_processes

SCRIPT = "torch_sharded.py"


def run(count, folder, *cases, patience=60):
    return in_processes(count, SCRIPT, str(folder), *cases, patience=patience)


@pytest.mark.thorough
def test_every_process_ends_in_words_what_one_does_alone(tmp_path):
    cases = "a_sample", "calls_between_steps", "files", "alone"
    first, second = run(2, tmp_path, *cases, patience=5)
    alone = "Process 0 {} a sharded variable, but another process does not."
    read, assigned = alone.format("reads"), alone.format("assigns to")
    both = [
        "Two processes read different sharded variables.",
        "'sequential' cannot be exported, because its variables are sharded across processes.",
        "state_dict of 'sequential' was called, but its state is sharded.",
        "'sequential' cannot be verified with sharded state across several processes:",
    ]
    of_fit = [first.pop(3), second.pop(0)]  # the one that gives up first ends the call of the other
    assert first == [read, assigned, read, *both]
    assert second == both
    assert all(words.startswith(("Process 0 ", "Process 1 ")) for words in of_fit), of_fit


@pytest.mark.whole
def test_models_and_optimizers(tmp_path):
    run(3, tmp_path, "every_model_and_optimizer")


@pytest.mark.whole
def test_callbacks_and_variables_that_are_made_later(tmp_path):
    run(3, tmp_path, "callbacks", "built_and_compiled_later", "built_and_loaded_in_shards")


@pytest.mark.whole
def test_other_models_and_other_code_that_writes(tmp_path):
    run(2, tmp_path, "two_models", "writes_in_place")


@pytest.mark.whole
@pytest.mark.parametrize(
    ("then", "case"),
    [("2 processes", "goes_on"), ("3 devices", "goes_on"), ("3 devices", "goes_on_replicated")],
)
def test_a_checkpoint_of_three_processes_goes_on_elsewhere(tmp_path, then, case):
    run(3, tmp_path, "stops")
    if then == "2 processes":
        run(2, tmp_path, case)
        return
    script = Path(__file__).with_name(SCRIPT)
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path), case]
    alone = {**environment(), "LOCKSTEP_REHEARSE": "3"}
    subprocess.run(command, env=alone, check=True, timeout=300)


@pytest.mark.whole
def test_the_model_after_an_error_or_a_signal_in_one_process(tmp_path):
    """It is as after the last step of all, unless the error is in an update."""
    assert run(2, tmp_path, "a_signal") == [["KeyboardInterrupt"]] * 2
    first, second = run(2, tmp_path, "errors")
    lost = "'sequential' is lost: its state was sharded, and an error interrupted an update,"
    assert [line.split(" by ")[0] for line in first[:2]] == ["Process 1 left its fit"] * 2
    assert second[:2] == ["KeyError"] * 2
    assert first[2:] == second[2:] == [lost] * 2
