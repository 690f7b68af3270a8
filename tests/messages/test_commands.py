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
            "To rehearse on virtual CPU devices, add --rehearse to the command.\n",
        ),
    ],
)
def test_verify_names_the_remedy_of_the_command(arguments, said, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    ours = ("LOCKSTEP", "JAX_", "XLA_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "verify", *arguments],
        cwd=tmp_path,
        env={**clean, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == said
