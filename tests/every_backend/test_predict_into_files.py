"""`lockstep.predict`: the rows of `model.predict` in a file, also after a kill."""

import errno
import json
import os
import tracemalloc

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.attach.attachment import session_of
from lockstep.checkpoint import prediction_folder
from lockstep.errors import PredictionFileError, UnsupportedModel, UnusableData
from lockstep.training import predictions
from tests.tiers import rest

X = np.random.default_rng(0).normal(size=(53, 6)).astype("float32")


def model(outputs=1):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    x = keras.Input((6,))
    h = layers.Dropout(0.5)(layers.Dense(8, activation="tanh")(x))
    heads = {name: layers.Dense(size, name=name)(h) for name, size in (("a", 2), ("b", 3))}
    return keras.Model(x, heads if outputs == 2 else heads["a"])


GIVEN = ["weights", "model", "rows", "batch size", "fewer", "fewer rows", "steps", "folder"]


def batches(x=X, rows=8):
    for first in range(0, len(x), rows):
        yield (x[first : first + rows],)


def failing(number, x=X):
    """Batches that end by an error before batch `number`, as a kill would end them."""
    for count, batch in enumerate(batches(x)):
        if count == number:
            raise ZeroDivisionError
        yield batch


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 7

    def __getitem__(self, number):
        return (X[8 * number : 8 * number + 8],)


def unfinished(made, path, number=4, x=X):
    with pytest.raises(ZeroDivisionError):
        lockstep.predict(made, failing(number, x), path, verbose=0)


def assert_rows(found, wanted):
    assert found.dtype == np.asarray(wanted).dtype
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("devices", [3, *rest(None, 1, 2)])
@pytest.mark.parametrize("source", ["arrays", "generator", "dataset"])
def test_the_file_has_the_rows_of_predict(tmp_path, devices, source):
    made = model()
    wanted = made.predict(X, verbose=0)
    if devices:
        lockstep.distribute(made, devices)
    data = {"arrays": X, "generator": batches(), "dataset": Batches(workers=2)}[source]
    path = lockstep.predict(made, data, tmp_path / "scores.npy", batch_size=None, verbose=0)
    assert_rows(np.load(path, mmap_mode="r"), wanted)
    assert [each.name for each in tmp_path.iterdir()] == ["scores.npy"]
    assert (session_of(made) is not None) == bool(devices)  # as before
    lockstep.release(made)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("times", [1, *rest(2)])
def test_an_unfinished_call_goes_on_with_other_devices(tmp_path, capsys, times):
    """It computes no row again, and ends with the rows of one call."""
    made, path = lockstep.distribute(model(), 3), tmp_path / "scores.npy"
    times = 1 if keras.backend.backend() == "torch" else times  # Keras refuses more there
    made.compile(steps_per_execution=times)
    wanted = made.predict(X, verbose=0)
    lockstep.predict(made, X[:1], path, verbose=0)  # an older file
    unfinished(made, path)
    assert np.load(path).shape == (1, 2), "the older file stays"
    position = json.loads((tmp_path / "scores.npy.partial/position.json").read_text())
    assert position["position"][0] == 4
    lockstep.distribute(made, 2)
    got = []
    end = keras.callbacks.LambdaCallback(on_predict_batch_end=lambda batch, logs: got.append(batch))
    capsys.readouterr()
    lockstep.predict(made, batches(), path, verbose=2, callbacks=end)
    assert "scores.npy continues after 32 rows" in capsys.readouterr().out
    assert got == ([4, 5, 6] if times == 1 else [5, 7])
    assert_rows(np.load(path), wanted)
    assert [each.name for each in tmp_path.iterdir()] == ["scores.npy"]
    lockstep.release(made)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("known", [True, False])
def test_a_call_that_was_killed_after_its_last_row_computes_nothing(tmp_path, monkeypatch, known):
    made, path = model(), tmp_path / "scores.npy"
    wanted = made.predict(X, verbose=0)
    monkeypatch.setattr(prediction_folder.PredictionFolder, "finish", killed)
    with pytest.raises(OSError, match="killed"):
        lockstep.predict(made, X if known else batches(), path, batch_size=8, verbose=0)
    monkeypatch.undo()
    monkeypatch.setattr(type(made), "predict_step", None)
    lockstep.predict(made, X if known else batches(), path, batch_size=8, verbose=0)
    assert_rows(np.load(path), wanted)


def killed(folder):
    raise OSError("killed")


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_rows_after_the_noted_position_are_written_once(tmp_path, monkeypatch):
    """A kill leaves more rows in the file than the position says."""
    monkeypatch.setattr(predictions, "SECONDS", 1e9)
    made, path = model(), tmp_path / "scores.npy"
    wanted = made.predict(X, verbose=0)
    note = predictions.RowsIntoFiles._note
    first = iter([note])

    def note_once(self):
        next(first, lambda self: None)(self)

    monkeypatch.setattr(predictions.RowsIntoFiles, "_note", note_once)
    unfinished(made, path)
    rows = tmp_path / "scores.npy.partial/rows/scores.npy"
    position = json.loads((tmp_path / "scores.npy.partial/position.json").read_text())
    assert position["files"][0]["rows"] == 8
    assert rows.stat().st_size > 128 + 8 * 2 * 4, "32 rows are there"
    monkeypatch.undo()
    lockstep.predict(made, batches(), path, verbose=0)
    assert_rows(np.load(path), wanted)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_several_outputs_are_a_folder_that_is_replaced_whole(tmp_path):
    made, path = lockstep.distribute(model(outputs=2), 2), tmp_path / "scores"
    wanted = made.predict(X, verbose=0)
    for data in (X[:9], X):
        lockstep.predict(made, data, path, verbose=0)
    assert [each.name for each in tmp_path.iterdir()] == ["scores"]
    assert sorted(each.name for each in path.iterdir()) == ["a.npy", "b.npy"]
    unfinished(made, path)
    lockstep.predict(made, batches(), path, verbose=0)
    assert [each.name for each in tmp_path.iterdir()] == ["scores"]
    for name in ("a", "b"):
        assert_rows(np.load(path / f"{name}.npy"), wanted[name])
    lockstep.release(made)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("renames", [0, 1])
def test_a_kill_while_a_folder_is_replaced_loses_neither_folder(tmp_path, monkeypatch, renames):
    """The old folder moves away, then the new one comes: here a failure stands for the kill."""
    made, path = model(outputs=2), tmp_path / "scores"
    lockstep.predict(made, X[:9], path, verbose=0)
    rename, count = os.rename, iter(range(9))

    def fail(*names):
        if next(count) == renames:
            raise OSError(errno.EIO, "Input/output error")
        rename(*names)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        lockstep.predict(made, batches(), path, verbose=0)
    monkeypatch.undo()
    old = path if renames == 0 else tmp_path / "scores.partial/replaced"
    assert len(np.load(old / "a.npy")) == 9
    seen = []
    count = keras.callbacks.LambdaCallback(on_predict_batch_end=lambda batch, logs: seen.append(1))
    lockstep.predict(made, batches(), path, verbose=0, callbacks=count)
    assert not seen, "all rows were written"
    assert_rows(np.load(path / "a.npy"), made.predict(X, verbose=0)["a"])
    assert [each.name for each in tmp_path.iterdir()] == ["scores"]


def test_a_kill_while_a_folder_is_replaced_keeps_the_old_one_if_there_is_no_position(
    tmp_path, monkeypatch
):
    """A model whose state goes from batch to batch has none."""
    made, path = model(outputs=2), tmp_path / "scores"
    lockstep.predict(made, X[:9], path, verbose=0)
    monkeypatch.setattr(predictions.RowsIntoFiles, "_note", lambda self: None)
    rename, count = os.rename, iter(range(9))

    def fail(*names):
        if next(count) == 1:
            raise OSError(errno.EIO, "Input/output error")
        rename(*names)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        lockstep.predict(made, X, path, verbose=0)
    assert len(np.load(path / "a.npy")) == 9
    assert [each.name for each in tmp_path.iterdir()] == ["scores"]


def test_a_damaged_position_is_refused(tmp_path):
    made, path = model(), tmp_path / "scores.npy"
    unfinished(made, path)
    position = tmp_path / "scores.npy.partial/position.json"
    for text in ("{", "{}"):
        position.write_text(text)
        with pytest.raises(PredictionFileError, match=r"position\.json cannot be read"):
            lockstep.predict(made, batches(), path, verbose=0)
    (tmp_path / "scores.npy.partial/.saving-0123abcd-position.json").write_text("{")
    position.unlink()
    lockstep.predict(made, X, path, verbose=0)
    assert [each.name for each in tmp_path.iterdir()] == ["scores.npy"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "scores.npy").symlink_to(tmp_path / "there/real.npy")
    made = model()
    lockstep.predict(made, X, tmp_path / "scores.npy", verbose=0)
    assert (tmp_path / "scores.npy").is_symlink()
    assert_rows(np.load(tmp_path / "there/real.npy"), made.predict(X, verbose=0))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_memory_does_not_grow_with_the_rows(tmp_path):
    """NumPy tells Python of its memory. All rows would be 5 MB."""
    made = lockstep.distribute(model(), 2)
    x, peaks = np.tile(X, (40, 1)), []

    def many(rows):
        for _ in range(rows // len(x)):
            yield (x,)

    for rows in (20 * len(x), 300 * len(x)):
        tracemalloc.start()
        lockstep.predict(made, many(rows), tmp_path / "scores.npy", verbose=0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert np.load(tmp_path / "scores.npy", mmap_mode="r").shape == (300 * len(x), 2)
    assert peaks[1] < peaks[0] + 1e6
    lockstep.release(made)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_function_gets_the_rows_in_order():
    made, got = lockstep.distribute(model(outputs=2), 3), []
    wanted = made.predict(X, verbose=0)
    assert lockstep.predict(made, batches(), got.append, verbose=0) is None
    assert [len(each["a"]) for each in got] == [8] * 6 + [5]
    for name in ("a", "b"):
        assert all(type(each[name]) is np.ndarray for each in got)
        assert_rows(np.concatenate([each[name] for each in got]), wanted[name])
    lockstep.release(made)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "given", ["weights", "model", "rows", "batch size", "fewer", "fewer rows", "steps", "folder"]
)
def test_what_does_not_belong_together_is_refused_and_nothing_is_lost(tmp_path, given):
    made, path = model(), tmp_path / "scores.npy"
    wanted = made.predict(X, verbose=0)
    unfinished(made, path)
    partial = tmp_path / "scores.npy.partial"
    before = {each: each.read_bytes() for each in partial.rglob("*") if each.is_file()}
    other, data, options, words = made, batches(), {}, "have changed"
    if given == "weights":
        other, words = model(), "a digest of the weights was"
        other.layers[1].bias.assign(np.ones(8))
    elif given == "model":
        other, words = model(), "activation was 'tanh', *\nbut is now 'relu'"
        config = other.get_config()
        config["layers"][1]["config"]["activation"] = "relu"
        other = keras.Model.from_config(config)
        other.set_weights(made.get_weights())
    elif given == "rows":
        data = batches(np.flip(X, axis=0))
    elif given == "batch size":
        data = batches(rows=4)
    elif given == "fewer":
        data, words = batches(X[:16]), "4 batches are already written, but the data now end after 2"
    elif given == "fewer rows":
        data, options = X[:16], {"batch_size": 8}
        words = "4 batches are already written, but the data now end after 2"
    elif given == "steps":
        options, words = (
            {"steps": 3},
            "steps=3 was given, but predictions of 4 steps are already written",
        )
    else:
        (partial / "thesis.txt").write_text("mine")
        words = "not a folder of unfinished predictions: it contains 'thesis.txt'"
    with pytest.raises(PredictionFileError, match=words):
        lockstep.predict(other, data, path, verbose=0, **options)
    after = {each: each.read_bytes() for each in before}
    assert before == after
    (partial / "thesis.txt").unlink(missing_ok=True)
    lockstep.predict(made, batches(), path, verbose=0)
    assert_rows(np.load(path), wanted)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("full_at", [0, 2])
def test_a_full_disk_costs_the_rows_after_the_position_alone(tmp_path, monkeypatch, full_at):
    made, path = model(), tmp_path / "scores.npy"
    wanted = made.predict(X, verbose=0)
    append, count = prediction_folder._RowFile.append, iter(range(9))

    def half(self, rows):
        if next(count) == full_at:
            append(self, rows[:3])
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, rows)

    monkeypatch.setattr(prediction_folder._RowFile, "append", half)
    with pytest.raises(OSError, match="No space left"):
        lockstep.predict(made, batches(), path, verbose=0)
    monkeypatch.undo()
    assert not path.exists()
    lockstep.predict(made, batches(), path, verbose=0)
    assert_rows(np.load(path), wanted)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_state_that_goes_from_batch_to_batch_begins_anew(tmp_path):
    """A rebuilt model with dropout has other seeds, and goes on."""
    keras.utils.set_random_seed(3)
    lstm, x = layers.LSTM(4, stateful=True), X[:48].reshape(48, 3, 2)
    stateful = keras.Sequential([keras.Input(batch_shape=(8, 3, 2)), lstm])
    rows = [keras.ops.convert_to_numpy(stateful(part)) for (part,) in batches(x)]
    wanted = np.concatenate(rows)  # Keras's own predict on JAX loses the state of a batch
    lstm.reset_states()
    path = tmp_path / "scores.npy"
    with pytest.raises(ZeroDivisionError):
        lockstep.predict(stateful, failing(3, x), path, verbose=0)
    assert [*tmp_path.iterdir()] == []
    lstm.reset_states()
    lockstep.predict(stateful, batches(x), path, verbose=0)
    assert_rows(np.load(path), wanted)
    made, again = model(), model()
    again.layers[2].seed_generator.state.assign([1, 2])
    unfinished(made, path)
    assert (tmp_path / "scores.npy.partial").exists()
    lockstep.predict(again, batches(), path, verbose=0)
    assert_rows(np.load(path), made.predict(X, verbose=0))


class Late(layers.Layer):
    """Counts large rows, and adds their number: its state is as before for small ones."""

    def build(self, shape):
        self.count = self.add_weight(name="count", initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign_add(keras.ops.sum(keras.ops.cast(x[:, 0] > 50, x.dtype)))
        return x + self.count


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_state_that_changes_late_is_no_position(tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "SECONDS", 0.0)
    made = keras.Sequential([keras.Input((6,)), Late()])
    x, path = X.copy(), tmp_path / "scores.npy"
    x[[20, 33], 0] = 99
    wanted = np.concatenate([keras.ops.convert_to_numpy(made(part)) for (part,) in batches(x)])
    made.layers[0].count.assign(0)
    unfinished(made, path, 5, x)
    position = json.loads((tmp_path / "scores.npy.partial/position.json").read_text())
    assert position["position"][0] < 3
    made.layers[0].count.assign(0)
    lockstep.predict(made, batches(x), path, verbose=0)
    assert_rows(np.load(path), wanted)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_more_rows_follow_an_execution_that_was_not_full(tmp_path, monkeypatch):
    made, path, x = model(), tmp_path / "scores.npy", np.tile(X[:48], (2, 1))
    made.compile(steps_per_execution=1 if keras.backend.backend() == "torch" else 4)
    monkeypatch.setattr(prediction_folder.PredictionFolder, "finish", killed)
    with pytest.raises(OSError, match="killed"):
        lockstep.predict(made, x[:48], path, batch_size=8, verbose=0)  # 6 batches
    monkeypatch.undo()
    lockstep.predict(made, x, path, batch_size=8, verbose=0)
    assert_rows(np.load(path), made.predict(x, verbose=0))


class Named(keras.Model):
    def call(self, x):
        return {"x/y": x + 1, "x_y": x + 2}


def test_each_output_has_a_file_of_its_own(tmp_path):
    made = Named()
    wanted = made.predict(X, verbose=0)
    lockstep.predict(made, X, tmp_path / "scores", verbose=0)
    assert_rows(np.load(tmp_path / "scores/x_y.npy"), wanted["x/y"])
    assert_rows(np.load(tmp_path / "scores/x_y_.npy"), wanted["x_y"])


class Scaled(layers.Layer):
    def __init__(self, mode, **options):
        super().__init__(**options)
        self.mode = mode

    def call(self, x):
        return x * int(self.mode[-1])

    def get_config(self):
        return {**super().get_config(), "mode": self.mode}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_an_option_that_ends_with_a_number_is_no_name_of_a_layer(tmp_path):
    first, second = (keras.Sequential([keras.Input((6,)), Scaled(f"scale_{n}")]) for n in (1, 2))
    unfinished(first, tmp_path / "scores.npy")
    with pytest.raises(PredictionFileError, match="mode was 'scale_1',\nbut is now 'scale_2'"):
        lockstep.predict(second, batches(), tmp_path / "scores.npy", verbose=0)


class Averaged(keras.Model):
    """Its output is one number for a batch."""

    def call(self, x):
        return keras.ops.mean(x)


class Longer(keras.Model):
    """Its rows are as long as the batch."""

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(x))


class Own(keras.Model):
    def predict(self, x):
        return x


def test_bad_input_says_what_to_do(tmp_path):
    path = tmp_path / "scores.npy"
    for made, to, words in (
        (model(2), path, "2 outputs: a, b.\nName a folder, such as 'scores'"),
        (model(), tmp_path / "scores", "one output.\nName a file, such as 'scores.npy'"),
        (model(), tmp_path / "none/scores.npy", "there is no folder"),
        (model(), 5, "to=5 was given, but a path was expected"),
        (Averaged(), path, "one value for the whole batch"),
        (Longer(), path, r"rows of shape \(5,\) .* earlier rows have\n\(8,\)"),
    ):
        with pytest.raises(PredictionFileError, match=words):
            lockstep.predict(made, X, to, batch_size=8, verbose=0)
        if not isinstance(made, Longer):
            assert [*tmp_path.iterdir()] == []
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores/thesis.txt").write_text("mine")
    with pytest.raises(PredictionFileError, match=r"it has 'thesis.txt'.\nName a folder that"):
        lockstep.predict(model(2), X, tmp_path / "scores", verbose=0)
    with pytest.raises(UnsupportedModel, match="Own has its own predict"):
        lockstep.predict(Own(), X, path)
    with pytest.raises((UnusableData, ValueError)):
        lockstep.predict(model(), iter([]), tmp_path / "empty.npy", verbose=0)
    assert not (tmp_path / "empty.npy").exists()


def test_short_floats_are_written_as_float32(tmp_path):
    """A `.npy` file has no bfloat16; float32 holds the same values."""
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.Input((6,)), layers.Dense(2, dtype="bfloat16")])
    path = lockstep.predict(made, X, tmp_path / "scores.npy", verbose=0)
    assert np.load(path).dtype == "float32"
    wanted = made.predict(X, verbose=0).astype("float32")
    np.testing.assert_array_equal(np.load(path), wanted)
