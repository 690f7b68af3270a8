"""What `lockstep inspect` says about the folder of a run."""

import json
import shlex

import keras
import pytest
from click.testing import CliRunner

import lockstep
from lockstep import errors
from lockstep.checkpoint.run_folder import RunFolder
from lockstep.cli import main
from tests.conformance.common import data, model
from tests.processes.common import python


def invoke(*words):
    return CliRunner().invoke(main, [*map(str, words)])


def train(folder, made, **options):
    lockstep.distribute(made, 2)
    checkpoint = lockstep.Checkpoint(folder, keep=2, **options)
    made.fit(*data(), 32, epochs=3, verbose=0, callbacks=[checkpoint])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with two checkpoints, of the second and the third epoch."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    made = model()
    train(folder, made, monitor="loss")
    return folder


def test_its_checkpoints_and_the_command_that_exports_the_newest(run, tmp_path, monkeypatch):
    found = lockstep.inspect(run)
    assert [saved.position for saved in found.checkpoints] == [
        "the end of epoch 3",
        "the end of epoch 2",
    ]
    assert all(saved.flaw is None and saved.devices == 2 for saved in found.checkpoints)
    assert [saved.best for saved in found.checkpoints] == [True, False]
    assert found.epochs == 3
    assert found.command == f"lockstep export {run} -o digits.keras"
    assert (
        str(found)
        == f"{run}: 2 checkpoints; the newest is at the end of epoch 3. Next: {found.command}"
    )
    shown = invoke("inspect", run)
    assert shown.exit_code == 0
    assert shown.output.endswith(f"next: {found.command}\n")
    monkeypatch.chdir(tmp_path)
    done = invoke(*shlex.split(found.command)[1:])
    assert done.exit_code == 0, done.output
    assert keras.models.load_model("digits.keras").count_params() == model().count_params()


def test_one_checkpoint_of_a_run(run):
    newest = RunFolder(run).checkpoints()[0]
    found = lockstep.inspect(newest)
    assert [saved.name for saved in found.checkpoints] == [newest.name]
    assert found.command == f"lockstep export {newest} -o digits.keras"


def test_a_run_as_json(run):
    report = json.loads(invoke("inspect", run, "--json").output)
    assert report["checkpoints"][0]["position"] == "the end of epoch 3"


def test_no_framework_is_imported(run):
    script = (
        f"import lockstep, sys; lockstep.inspect({str(run)!r})\n"
        "print([m for m in ('keras', 'jax', 'tensorflow', 'torch') if m in sys.modules])"
    )
    assert python(script) == "[]"


def test_a_damaged_checkpoint_is_named(run, tmp_path):
    train(tmp_path / "run", model())
    newest, _ = RunFolder(tmp_path / "run").checkpoints()
    (newest / "manifest.json").write_text("{")
    found = lockstep.inspect(tmp_path / "run")
    assert [saved.flaw is None for saved in found.checkpoints] == [False, True]
    assert "the newest is at the end of epoch 2" in str(found)
    assert "DAMAGED" in invoke("inspect", tmp_path / "run").output


def test_a_model_with_a_class_of_ones_own_needs_its_code(tmp_path):
    class Doubled(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    made = keras.Sequential([keras.Input((12,)), Doubled(), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    lockstep.distribute(made, 2)
    x = keras.random.normal((8, 12))
    made.fit(x, x[:, :1], verbose=0, callbacks=[lockstep.Checkpoint(tmp_path / "run")])
    found = lockstep.inspect(tmp_path / "run")
    assert found.needs == ("Doubled",)
    assert "needs  Doubled (your code)" in invoke("inspect", tmp_path / "run").output
    assert found.command.endswith(" -o run.keras --model FILE.PY:FUNCTION")


def test_a_functional_model_needs_no_code(tmp_path):
    """Keras gives its class a registered name, as to a user's."""
    inputs = keras.Input((12,))
    made = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    made.compile("sgd", "mse")
    lockstep.distribute(made, 2)
    x = keras.random.normal((8, 12))
    made.fit(x, x[:, :1], verbose=0, callbacks=[lockstep.Checkpoint(tmp_path / "run")])
    assert lockstep.inspect(tmp_path / "run").needs == ()


def test_folders_that_are_no_run(run, tmp_path):
    for folder, said in (
        (run.parent, "is a folder of runs, but a single file was expected.\n"
                     f"Give one of the runs in it: {run}"),
        (tmp_path, "is an empty folder, but a single file was expected.\n"
                   "Give a file, or the folder of a lockstep.Checkpoint."),
    ):  # fmt: skip
        with pytest.raises(errors.UnreadableFile) as caught:
            lockstep.inspect(folder)
        assert str(caught.value) == f"{folder} {said}"
    with pytest.raises(errors.UnreadableFile, match="Export a file from it: lockstep export"):
        lockstep.rescue(run, tmp_path / "single.keras")
    RunFolder(tmp_path / "new").open()
    with pytest.raises(errors.CheckpointError, match="contains no checkpoint yet"):
        lockstep.inspect(tmp_path / "new")
