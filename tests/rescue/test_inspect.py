"""`lockstep inspect`: what a file is, of every kind, and the next command."""

import ast
import json
import shlex
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
from click.testing import CliRunner

import lockstep
from lockstep.checkpoint.run_report import own_classes
from lockstep.cli import main
from lockstep.errors import UnreadableFile, UnsuitableOutput
from tests.rescue.old_files import LEGACY


def look(name):
    return lockstep.inspect(LEGACY / name)


@pytest.mark.parametrize(
    ("file", "library", "template", "devices"),
    [
        ("keras-2.2.4__mlp4-g2/parallel_full.h5", "Keras 2.2.4", "sequential_1", 2),
        ("keras-2.2.4__mlp4-g2/parallel_weights.h5", "Keras 2.2.4", "sequential_1", 2),
        ("keras-2.2.4__backbone_partfrozen-g4/parallel_full.h5", "Keras 2.2.4", "model_1", 4),
        ("keras-2.2.4__siamese-g2/parallel_weights.h5", "Keras 2.2.4", "model_1", 2),
        ("keras-2.0.9__cnn_bn-g2-kuza55/parallel_full.h5", "Keras 2.0.9", "model_1", 2),
        ("tfkeras-1.15.5__cnn_bn-g2/parallel_full.h5", "2.2.4-tf", "model", 2),
        ("tfkeras-2.3.4__seq_in_seq-g8/parallel_weights.h5", "tf.keras 2.3", "sequential", 8),
        ("tfkeras-2.3.4__mimo-g2/parallel_weights.h5", "tf.keras 2.3", "functional_1", 2),
    ],
)
def test_parallel_files_tell_their_template_and_devices(file, library, template, devices):
    found = look(file)
    assert found.parallel
    assert library in found.library
    assert (found.template, found.devices) == (template, devices)
    assert found.complete
    assert found.command.startswith("lockstep rescue ")


@pytest.mark.parametrize(
    "file",
    ["keras-2.2.4__mlp4-g2/template_full.h5", "keras-2.2.4__lookalike-single/template_full.h5",
     "keras-2.2.4__rnn-g2/template_weights.h5"],
)  # fmt: skip
def test_single_models_are_not_taken_for_parallel_ones(file):
    found = look(file)
    assert not found.parallel
    assert found.complete


def test_lambdas_of_the_template_are_named_before_anyone_needs_them():
    found = look("keras-2.2.4__lookalike-single/template_full.h5")
    assert found.needs == ("Lambda 'lambda_1'", "Lambda 'lambda_2'")
    assert "--custom" in found.command


def test_classes_of_ones_own_are_named_and_the_command_loads_the_file(tmp_path, monkeypatch):
    """Plain `load_model` cannot find them. A name that is no name stays out of the command."""

    class Halves(keras.layers.Layer):
        def call(self, x):
            return x / 2

    class Largest(keras.metrics.Mean):
        pass

    path = tmp_path / "own.keras"
    model = keras.Sequential([keras.Input((4,)), Halves(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Largest()])
    model.save(path)
    found = lockstep.inspect(path)
    assert found.needs == ("Halves", "Largest")
    monkeypatch.setitem(sys.modules, "your_file", types.ModuleType("your_file"))
    vars(sys.modules["your_file"]).update(Halves=Halves, Largest=Largest)
    program, dash, code = shlex.split(found.command)
    assert (program, dash) == ("python", "-c")
    with pytest.raises(TypeError, match="Could not locate class 'Halves'"):
        keras.models.load_model(path)
    exec(code, {})
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["config.json"] = parts["config.json"].replace(b'"Halves"', b'"x; import os"')
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    assert lockstep.inspect(path).needs == ("Largest",)


def test_a_configuration_may_be_nested_deeper_than_calls():
    deep = {}
    for _ in range(5000):
        deep = {"inner": [deep]}
    assert own_classes(deep) == ()


@pytest.mark.parametrize(
    ("file", "said", "arrays"),
    [
        ("keras-2.0.9__mlp_act-g2/parallel_full.h5", "no list of layers", 0),
        ("keras-2.0.9__longattr-g2/parallel_weights.h5", "no list of weights", 0),
        ("tfkeras-2.3.4__collide-g2/parallel_full.h5", "12 of 18 weights", 6),
    ],
)
def test_what_a_failed_save_left_behind_is_called_damaged(file, said, arrays):
    found = look(file)
    assert not found.complete
    assert said in found.flaw
    assert len(found.arrays) == arrays


def test_files_of_today(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    model.fit(np.ones((2, 3)), np.ones((2, 2)), verbose=0)
    model.save(tmp_path / "m.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    for name, kind, contents in (
        ("m.keras", "keras", "full model"),
        ("m.weights.h5", "weights.h5", "weights"),
    ):
        found = lockstep.inspect(tmp_path / name)
        assert (found.kind, found.contents, found.parallel) == (kind, contents, False)
        assert [entry.shape for entry in found.arrays] == [(3, 2), (2,)]
        assert found.optimizer
        assert found.complete
    model.save(tmp_path / "m.h5")
    found = lockstep.inspect(tmp_path / "m.h5")
    assert found.library == f"Keras {keras.__version__}"
    assert "load_model" in found.command
    with pytest.raises(UnreadableFile, match="nothing to rescue"):
        lockstep.rescue(tmp_path / "m.keras", tmp_path / "n.keras")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.h5", b"", "is empty"),
        ("x.h5", b"hello world, this is text", "of an unknown kind"),
        ("x.pt", b"PK\x05\x06" + bytes(18), "neither HDF5 nor .keras"),
        ("x.keras", b"PK\x03\x04 cut", "is not one"),
        ("model.ckpt.index", b"\x00\x00\x05", "TensorFlow checkpoint"),
    ],
)
def test_other_files_say_what_they_are_not(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableFile, match=said):
        lockstep.inspect(tmp_path / name)


def test_a_checkpoint_of_tensorflow_is_known_by_the_name_that_it_was_saved_by(tmp_path):
    """TensorFlow writes no file of that name; the error was that it is missing."""
    for end in (".index", ".data-00000-of-00001"):
        (tmp_path / f"model.ckpt{end}").touch()
    with pytest.raises(UnreadableFile, match=r"model\.ckpt is the name of a TensorFlow checkpoint"):
        lockstep.inspect(tmp_path / "model.ckpt")


def test_a_missing_file_and_a_folder_are_said(tmp_path):
    with pytest.raises(UnreadableFile, match="cannot be opened"):
        lockstep.inspect(tmp_path / "nothing.h5")
    with pytest.raises(UnreadableFile, match="an empty folder, but a single file was expected"):
        lockstep.inspect(tmp_path)  # it advised to give one of the files in it
    (tmp_path / "file").touch()
    with pytest.raises(UnreadableFile, match="is a folder, but a single file was expected"):
        lockstep.inspect(tmp_path)


def test_the_command_prints_a_tree_and_the_next_command():
    path = str(LEGACY / "keras-2.2.4__mlp4-g2" / "parallel_full.h5")
    done = CliRunner().invoke(main, ["inspect", path])
    assert done.exit_code == 0
    for said in ("Keras 2.2.4", "over 2 devices", "'sequential_1'", "kernel:0  6 x 8  float32",
                 "optimizer state", "next: lockstep rescue"):  # fmt: skip
        assert said in done.output


def test_json_has_everything():
    path = str(LEGACY / "keras-2.2.4__mlp4-g2" / "parallel_full.h5")
    found = json.loads(CliRunner().invoke(main, ["inspect", path, "--json"]).output)
    assert found["parallel"] is True
    assert found["devices"] == 2
    assert found["arrays"][0]["shape"] == [6, 8]


def test_errors_are_a_message_and_a_status_not_a_traceback(tmp_path):
    done = CliRunner().invoke(main, ["inspect", str(tmp_path / "nothing.h5")])
    assert done.exit_code == 1
    assert done.output.startswith("UnreadableFile: ")
    assert "Traceback" not in done.output


def test_the_printed_command_is_the_one_that_works(tmp_path):
    path = str(LEGACY / "keras-2.2.4__mlp4-g2" / "parallel_full.h5")
    command = lockstep.inspect(path).command.split()
    assert command[0] == "lockstep"
    output = tmp_path / command[command.index("-o") + 1]
    command[command.index("-o") + 1] = str(output)
    io = str(LEGACY / "keras-2.2.4__mlp4-g2" / "io.npz")
    done = CliRunner().invoke(main, [*command[1:], "--check", io])
    assert done.exit_code == 0, done.output
    assert "8 of 8 weights read back, equal" in done.output
    assert "outputs: largest difference" in done.output
    assert output.exists()


def test_the_users_files_are_taken_on_the_command_line(tmp_path):
    case = LEGACY / "tfkeras-2.3.4__custom-g2"
    base = ["rescue", str(case / "parallel_weights.h5"), "-o", str(tmp_path / "new.keras")]
    config = ["--config", str(case / "template_config.json")]
    done = CliRunner().invoke(main, [*base, *config])
    assert done.exit_code == 1
    assert "ScaledShift" in done.output
    custom = ["--custom", str(Path(__file__).parent / "old_layers.py")]
    done = CliRunner().invoke(main, [*base, *config, *custom, "--check", str(case / "io.npz")])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(main, base)
    assert done.exit_code == 1
    assert "no architecture" in done.output
    (tmp_path / "mine.py").write_text(
        "import keras\n"
        "def build():\n"
        "    return keras.Sequential([keras.Input((6,)), *(keras.layers.Dense(n, activation=a)\n"
        "        for n, a in ((8, 'relu'), (8, 'relu'), (6, 'tanh'), (3, 'softmax')))])\n"
    )
    case = LEGACY / "keras-2.2.4__mlp4-g2"
    done = CliRunner().invoke(
        main,
        ["rescue", str(case / "parallel_weights.h5"), "-o", str(tmp_path / "mine.keras"),
         "--model", f"{tmp_path / 'mine.py'}:build", "--check", str(case / "io.npz")],
    )  # fmt: skip
    assert done.exit_code == 0, done.output


def test_wrong_outputs_write_nothing(tmp_path):
    case = LEGACY / "keras-2.2.4__mlp4-g2"
    with np.load(case / "io.npz") as io:
        np.savez(tmp_path / "wrong.npz", x0=io["x0"], y0=io["y0"] + 0.001)
    with pytest.raises(lockstep.errors.OutputMismatch, match="Nothing was written"):
        lockstep.rescue(
            case / "parallel_full.h5", tmp_path / "new.keras", check=tmp_path / "wrong.npz"
        )
    assert not (tmp_path / "new.keras").exists()


@pytest.mark.parametrize(
    "statements",
    [
        "import lockstep",
        "import lockstep.rescue.commands, lockstep",
        "from lockstep.rescue import unwrap; import lockstep",
        "import lockstep.rescue.api; import lockstep",
        "import lockstep.cli, lockstep; from lockstep.rescue.read import release",
    ],
)
def test_the_function_is_not_hidden_by_its_package(statements):
    script = f"{statements}; assert callable(lockstep.rescue), lockstep.rescue"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_import_and_inspect_need_no_framework():
    script = (
        "import sys, lockstep, lockstep.cli\n"
        "heavy = {'keras', 'jax', 'tensorflow', 'torch', 'h5py', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        f"lockstep.inspect({str(LEGACY / 'keras-2.2.4__mlp4-g2' / 'parallel_full.h5')!r})\n"
        "heavy = {'keras', 'jax', 'tensorflow', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_printed_command_quotes_the_name_of_the_file(tmp_path):
    """`it's $(date).keras` was no Python, and ran a command."""
    file = tmp_path / 'it\'s "$(touch ran)".keras'
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.save(file)
    command = lockstep.inspect(file).command
    words = shlex.split(command)
    assert words[:2] == ["python", "-c"]
    names = [node.value for node in ast.walk(ast.parse(words[2])) if isinstance(node, ast.Constant)]
    assert names == [str(file)]


def test_inspect_and_rescue_say_the_same_of_weights_alone(tmp_path):
    """`rescue` called a file of two devices "a single model"."""
    old = LEGACY / "keras-2.2.4__mlp4-g2" / "parallel_weights.h5"
    found, done = lockstep.inspect(old), lockstep.rescue(old, tmp_path / "a.safetensors")
    assert found.parallel
    assert (found.template, found.devices) == (done.template, done.devices)
    assert f"the template {found.template!r} of a parallel model over 2 devices" in str(done)


def test_a_check_of_arrays_alone_is_refused_by_name(tmp_path):
    case = LEGACY / "keras-2.2.4__mlp4-g2"
    with pytest.raises(
        UnsuitableOutput, match=r"io\.npz' was requested, but .*a\.safetensors holds"
    ):
        lockstep.rescue(
            case / "parallel_full.h5", tmp_path / "a.safetensors", check=case / "io.npz"
        )
    assert list(tmp_path.iterdir()) == []
