"""What the commands say: help, wrong names, and the remedy that this door has."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from lockstep.cli import main


def help_of(*words):
    return CliRunner().invoke(main, [*words, "--help"], prog_name="lockstep").output


@pytest.mark.parametrize("name", sorted(main.commands))
def test_the_help_of_a_command_has_sentences_and_an_example(name):
    assert f"lockstep {name}" in help_of(name).split("Example: ")[1]
    first = main.commands[name].help.split("\n\n")[0]
    assert first[0].isupper()
    assert first.endswith(".")


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
            "TargetNotFound: 'train.py:biuld' was asked for, and train.py has no function "
            "'biuld'.\nDid you mean train.py:build?\n",
        ),
        (
            ["train.py:model"],
            "TargetNotFound: 'train.py:model' was asked for, and train.py has no function "
            "'model'.\nName a function that returns a compiled model, or (model, data). "
            "It has build, load.\n",
        ),
        (
            ["train.py:build", "--devices", "4"],
            "DeviceNotFound: devices=4 was asked for, and 1 is here: cpu:0.\n"
            "To rehearse on virtual CPU devices, give --devices 4 --rehearse.\n",
        ),
        (
            ["train.py:build", "--devices", "gpu:1"],
            "DeviceNotFound: devices='gpu:1' was asked for, and gpu:1 is not among the 1 here: "
            "cpu:0.\nTo rehearse on virtual CPU devices, give --devices 2 --rehearse.\n",
        ),
        (
            ["train.py:build"],
            "DeviceError: devices=None means cpu:0 alone, and verify compares several devices with "
            "one:\nnothing would be compared. Give devices=2 or more; to rehearse on virtual CPU "
            "devices, give --devices 2 --rehearse.\n",
        ),
        (
            ["train.py:build", "--devices", "cpuu:0"],
            "DeviceNotFound: devices='cpuu:0' was asked for, and cpuu:0 is not among the 1 here: "
            "cpu:0.\nDid you mean cpu:0?\n",
        ),
    ],
)
def test_verify_names_the_remedy_of_the_command(arguments, said, tmp_path):
    done = command(tmp_path, "verify", *arguments)
    assert done.returncode == 2
    assert done.stderr == said


def test_bench_names_the_remedy_of_the_command(tmp_path):
    """It advised the variable of a script."""
    done = command(tmp_path, "bench", "train.py:build", "--devices", "1,4")
    assert done.returncode == 1
    assert done.stderr == (
        "4 devices ...\n"
        "DeviceNotFound: devices=4 was asked for, and 1 is here: cpu:0.\n"
        "To rehearse on virtual CPU devices, give --devices 1,4 --rehearse.\n"
    )


def command(folder, *words):
    """Run a command beside train.py, on one CPU device."""
    (folder / "train.py").write_text(TRAIN)
    ours = ("LOCKSTEP", "JAX_", "XLA_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *words],
        cwd=folder,
        env={**clean, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
