"""What the commands say: help, wrong names, and the remedy that this door has."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner

from lockstep.cli import main
from tests.processes.common import clean_environment, warm_end


def help_of(*words):
    return CliRunner().invoke(main, [*words, "--help"], prog_name="lockstep").output


@pytest.mark.parametrize("name", sorted(main.commands))
def test_the_help_of_a_command_has_sentences_and_an_example(name):
    assert f"lockstep {name}" in help_of(name).split("Example: ")[1]
    first = main.commands[name].help.split("\n\n")[0]
    assert first[0].isupper()
    assert first.endswith(".")


def test_the_list_of_commands_has_whole_sentences():
    """click cuts a long one off."""
    listed = help_of().split("Commands:")[1]
    assert listed.count(".\n") == len(main.commands)
    assert "..." not in listed


def test_a_wrong_command():
    done = CliRunner().invoke(main, ["verfy"], prog_name="lockstep")
    assert done.exit_code == 2
    assert "No such command 'verfy'. Did you mean verify?" in done.output


TRAIN = """
import keras

def build():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model, (keras.ops.ones((8, 2)), keras.ops.ones((8, 1)))

def load():
    return None
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["train.py:biuld"],
            "TargetNotFound: 'train.py:biuld' was requested, but train.py has no function "
            "'biuld'.\n"
            "Did you mean train.py:build?\n",
        ),
        (
            ["train.py:model"],
            "TargetNotFound: 'train.py:model' was requested, but train.py has no function "
            "'model'.\n"
            "Name a function that returns a compiled model, or (model, data). It has build, "
            "load.\n",
        ),
        (
            ["train.py:build", "--devices", "4"],
            "DeviceNotFound: devices=4 was requested, but only 1 is available: cpu:0.\n"
            "To rehearse on virtual CPU devices, give --devices 4 --rehearse.\n",
        ),
        (
            ["train.py:build", "--devices", "gpu:1"],
            "DeviceNotFound: devices='gpu:1' was requested, but gpu:1 is not among the 1 "
            "available: cpu:0.\n"
            "To rehearse on virtual CPU devices, give --devices 2 --rehearse.\n",
        ),
        (
            ["train.py:build"],
            "DeviceError: The only device is cpu:0, but verify needs at least 2 devices.\n"
            "To rehearse on virtual CPU devices, give --devices 2 --rehearse.\n",
        ),
        (
            ["train.py:build", "--devices", "cpuu:0"],
            "DeviceNotFound: devices='cpuu:0' was requested, but cpuu:0 is not among the 1 "
            "available: cpu:0.\n"
            "Did you mean cpu:0?\n",
        ),
    ],
)
def test_verify_names_the_remedy_of_the_command(arguments, said, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    status, _, error = warm_end(["-m", "lockstep", "verify", *arguments], tmp_path)
    assert status == 2
    assert error == said


@pytest.mark.whole
def test_verify_shows_each_run_on_a_terminal(tmp_path):
    """Five to ten runs were silent, which on a large model is minutes."""
    words = ["train.py:build", "--devices", "2", "--rehearse", "--steps", "3"]
    terminal, end = pty.openpty()
    parts = []

    def read():
        with contextlib.suppress(OSError):  # Linux's end of a terminal
            while part := os.read(terminal, 1 << 16):
                parts.append(part)

    reader = threading.Thread(target=read)  # what is not read makes the writer wait
    reader.start()
    done = command(tmp_path, "verify", *words, stderr=end)
    os.close(end)
    reader.join()
    os.close(terminal)
    shown = b"".join(parts)
    assert done.returncode == 0, shown
    assert "2 devices give the same results as one device." in done.stdout
    lines = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode().replace("\r", "\n").split("\n")
    ends = [line.split("━")[0].strip() for line in lines if line.rstrip().endswith("3/3 steps")]
    assert list(dict.fromkeys(ends)) == [
        "one device",
        "one device again",
        "2 devices",
    ]


def test_verify_prints_a_line_for_each_run_where_there_is_no_terminal(tmp_path):
    """It was silent for minutes in a pipe, and looked as if it stood still."""
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["train.py:build", "--devices", "2", "--rehearse", "--steps", "3", "--json"]
    _, printed, error = warm_end(["-m", "lockstep", "verify", *words], tmp_path)
    assert error == "one device ...\n2 devices ...\n"
    assert json.loads(printed)["verdict"] == "equal"


def test_bench_names_the_remedy_of_the_command(tmp_path):
    """It advised the variable of a script."""
    done = command(tmp_path, "bench", "train.py:build", "--devices", "1,4")
    assert done.returncode == 1
    # On a slow machine, a line every ten seconds says what it waits for.
    said = [line for line in done.stderr.splitlines() if ", after " not in line]
    assert said == [
        "4 devices ...",
        "DeviceNotFound: devices=4 was requested, but only 1 is available: cpu:0.",
        "To rehearse on virtual CPU devices, give --devices 1,4 --rehearse.",
    ]


def command(folder, *words, stderr=subprocess.PIPE):
    """Run a command beside train.py, on one CPU device."""
    (folder / "train.py").write_text(TRAIN)
    clean = clean_environment("XLA_")
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *words],
        cwd=folder,
        env={**clean, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
    )
