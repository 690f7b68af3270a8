"""A plain `.keras` file out of any checkpoint, which Keras reads without lockstep."""

import keras
import numpy as np
import pytest
from click.testing import CliRunner
from keras import layers

import lockstep
from lockstep.checkpoint.export import export_model
from lockstep.checkpoint.run_folder import RunFolder
from lockstep.cli import main
from tests.checkpoints.data import arrays
from tests.checkpoints.models import recurrent, sequences
from tests.checkpoints.runs import small, train
from tests.conformance.side_by_side import held_out, smooth
from tests.processes.common import without_lockstep


def export(*arguments):
    done = CliRunner().invoke(main, ["export", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def trained(folder, make=smooth, source=arrays, **options):
    made = []

    def keep():
        made.append(make())
        return made[-1]

    train(source, folder, make=keep, devices=2, **options)
    return lockstep.release(made[0])


@pytest.mark.whole
def test_plain_keras_reads_it_and_trains_on(tmp_path):
    made = trained(tmp_path / "run", checkpoint={})
    status, said = export(tmp_path / "run", "-o", tmp_path / "model.keras")
    assert status == 0, said
    assert "00000003-epoch-0003-step-000000" in said
    made.save(tmp_path / "truth.keras")
    x, y = held_out()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    without_lockstep(
        "import keras, numpy as np\n"
        "data = np.load('data.npz')\n"
        "for name in ('truth', 'model'):\n"
        "    keras.utils.set_random_seed(1)\n"
        "    made = keras.models.load_model(f'{name}.keras')\n"
        "    made.fit(data['x'], data['y'], epochs=2, batch_size=7, verbose=0)\n"
        "    values = [v.value for v in [*made.variables, *made.optimizer.variables]]\n"
        "    np.savez(f'{name}.npz', *values)\n",
        cwd=tmp_path,
    )
    with np.load(tmp_path / "model.npz") as mine, np.load(tmp_path / "truth.npz") as theirs:
        assert mine.files == theirs.files
        for name in mine.files:
            np.testing.assert_array_equal(mine[name], theirs[name])


@pytest.mark.whole
def test_one_checkpoint_of_many(tmp_path):
    folder, kept = tmp_path / "run", []

    class Keep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kept.append(self.model.get_weights())

        def get_state(self):
            return None

        def set_state(self, state):
            pass

    trained(
        folder, small, callbacks=[Keep], checkpoint={"steps": 1, "keep": 99, "background": False}
    )
    (path,) = (p for p in RunFolder(folder).checkpoints() if p.name.endswith("0001-step-000002"))
    assert export(path, "-o", tmp_path / "one.keras")[0] == 0
    loaded = keras.models.load_model(tmp_path / "one.keras")
    for a, b in zip(loaded.get_weights(), kept[8], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.whole
def test_the_best(tmp_path):
    folder = tmp_path / "run"
    trained(folder, small, checkpoint={"monitor": "loss", "mode": "max", "keep": 1})
    best = RunFolder(folder).checkpoints()[-1]
    status, said = export(folder, "--best", "-o", tmp_path / "best.keras")
    assert status == 0
    assert best.name in said


@pytest.mark.whole
def test_a_stateful_rnn_without_its_state(tmp_path):
    made = trained(tmp_path / "run", recurrent, sequences, epochs=1)
    assert export(tmp_path / "run", "-o", tmp_path / "model.keras")[0] == 0
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for a, b in zip(loaded.get_weights(), made.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def own():
    class Own(keras.Model):  # where no file can find it
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    keras.utils.set_random_seed(1)
    made = Own()
    made.compile("sgd", "mse")
    return made


def test_a_class_of_ones_own_needs_its_code(tmp_path):
    made = trained(tmp_path / "run", own, epochs=1)
    status, said = export(tmp_path / "run", "-o", tmp_path / "model.keras")
    assert status == 1
    assert "cannot be built from the checkpoint alone: Could not locate class 'Own'.\n" in said
    assert "--model FILE.PY:FUNCTION" in said
    (tmp_path / "code.py").write_text(
        "import numpy as np\n"
        "from tests.checkpoints.test_export import own\n"
        "def build():\n"
        "    made = own()\n"
        "    made(np.zeros((1, 4), 'float32'))\n"
        "    return made\n"
    )
    target = f"{tmp_path / 'code.py'}:build"
    status, said = export(tmp_path / "run", "-o", tmp_path / "model.keras", "--model", target)
    assert status == 0, said
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects={"Own": type(made)})
    x, _ = held_out()
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), made.predict(x, verbose=0))


def test_another_model_of_the_same_shapes_is_refused(tmp_path):
    def made(activation, names="ab"):
        model = keras.Sequential([keras.Input((4,))])
        for name, act in zip(names, (activation, None), strict=True):
            model.add(layers.Dense(4, activation=act, name=name))
        model.add(layers.Dense(2))
        model.compile("sgd", "mse")
        return model

    trained(tmp_path / "run", lambda: made("relu"), epochs=1)
    for other in (made("tanh"), made("relu", "ba")):
        with pytest.raises(
            lockstep.errors.CheckpointMismatch, match="a different model"
        ) as refused:
            export_model(tmp_path / "run", tmp_path / "a.keras", other)
        assert str(refused.value).splitlines()[1:] == [
            "Name the function that builds the model of the checkpoint."
        ]
    export_model(tmp_path / "run", tmp_path / "a.keras", made("relu"))


def test_a_file_that_cannot_be_written_is_refused_and_nothing_left(tmp_path, monkeypatch):
    made = trained(tmp_path / "run", small, epochs=1)

    def half(self, file):
        file.write_text("half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(made), "save", half)
    with pytest.raises(lockstep.errors.CheckpointError, match=r"cannot be written: No space left"):
        export_model(tmp_path / "run", tmp_path / "a.keras")
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_what_cannot_be_exported_is_refused_and_nothing_written(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("")
    trained(tmp_path / "run", small, epochs=1)
    cases = [
        ((tmp_path / "none", "-o", tmp_path / "a.keras"), "contains no checkpoint"),
        ((tmp_path / "notes", "-o", tmp_path / "a.keras"), "contains no checkpoint"),
        ((tmp_path, "-o", tmp_path / "a.keras"), f"one of the runs in it: {tmp_path / 'run'}"),
        ((tmp_path / "run", "-o", tmp_path / "a.h5"), "a .keras file"),
        ((tmp_path / "run", "--best", "-o", tmp_path / "a.keras"), "the run monitored nothing"),
    ]
    for arguments, words in cases:
        status, said = export(*arguments)
        assert (status, words in said) == (1, True), said
    assert not list(tmp_path.glob("*.keras"))
    assert not list(tmp_path.glob("*.h5"))


def with_lambda():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3),
            layers.Lambda(lambda x: 2.0 * x, output_shape=(3,)),
            layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")
    return model


def test_a_run_with_a_lambda_is_exported(tmp_path):
    """`export` compared the bytes of a lambda with the hash that a checkpoint has."""
    x = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
    model = lockstep.distribute(with_lambda(), 2)
    folder = tmp_path / "run"
    model.fit(x, x[:, :1], verbose=0, callbacks=[lockstep.Checkpoint(folder)])
    lockstep.release(model)
    export_model(folder, tmp_path / "out.keras", model=with_lambda())
    found = keras.models.load_model(tmp_path / "out.keras", safe_mode=False)
    np.testing.assert_array_equal(found.predict(x, verbose=0), model.predict(x, verbose=0))
