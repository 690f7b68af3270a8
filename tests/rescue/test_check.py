"""`check=` and the files that the commands are given: what is compared, what is refused."""

import zipfile
from contextlib import contextmanager

import keras
import numpy as np
import pytest
from click.testing import CliRunner

import lockstep
from lockstep.cli import main
from lockstep.errors import OutputMismatch, UnreadableFile
from lockstep.rescue import outputs_check
from lockstep.rescue import write as write_module
from tests.rescue import old_files

RNG = np.random.default_rng(0)
KERNEL, BIAS = RNG.normal(size=(4, 2)).astype("float32"), RNG.normal(size=2).astype("float32")
X = RNG.normal(size=(3, 4)).astype("float32")


def old(tmp_path, scale=1.0):
    config = old_files.sequential([old_files.dense(2, name="d")], (None, 4))
    weights = [("d/kernel:0", (KERNEL * scale).astype("float32")), ("d/bias:0", BIAS)]
    return old_files.parallel_full(tmp_path / "old.h5", config, weights)


def checked(tmp_path, scale, x, y):
    np.savez(tmp_path / "io.npz", x0=x, y0=y)
    return lockstep.rescue(old(tmp_path, scale), tmp_path / "new.keras", check=tmp_path / "io.npz")


def test_one_number_that_is_none_in_both_does_not_excuse_the_others(tmp_path):
    x = X.copy()
    x[0, 0] = np.nan
    y = x @ KERNEL + BIAS
    assert checked(tmp_path, 1, x, y).difference < 1e-5
    y[1:] += 5
    with pytest.raises(OutputMismatch):
        checked(tmp_path, 1, x, y)
    y[1:] -= 5
    y[2, 0] = np.nan
    with pytest.raises(OutputMismatch, match="by inf,"):
        checked(tmp_path, 1, x, y)


def test_large_outputs_have_no_more_digits_than_others(tmp_path):
    y = (X.astype("float64") @ (KERNEL * 1e5).astype("float32") + BIAS).astype("float32")
    assert checked(tmp_path, 1e5, X, y).difference < 1e-5
    with pytest.raises(OutputMismatch):
        checked(tmp_path, 1e5, X, y * np.float32(1.0001))


def test_layers_are_not_mistaken_for_others_while_the_check_loads():
    """Keras tells layers apart by `id` while it loads, and ids of freed layers come again."""
    from keras.src.saving import serialization_lib

    from lockstep.keras_compat import serialized_objects_kept

    def shared_ids():
        configs = [keras.saving.serialize_keras_object(keras.layers.LSTM(2)) for _ in range(50)]
        return sum("shared_object_id" in config for config in configs)

    with serialization_lib.ObjectSharingScope():
        assert shared_ids() > 0
    with serialization_lib.ObjectSharingScope(), serialized_objects_kept():
        assert shared_ids() == 0


def test_a_file_that_loads_wrongly_is_refused(tmp_path, monkeypatch):
    load = keras.models.load_model

    def wrong(*args, **kwargs):
        model = load(*args, **kwargs)
        model.layers[0].kernel.assign(KERNEL + 1)
        return model

    monkeypatch.setattr(keras.models, "load_model", wrong)
    with pytest.raises(OutputMismatch, match="differ from the expected"):
        checked(tmp_path, 1, X, X @ KERNEL + BIAS)
    assert not (tmp_path / "new.keras").exists()


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5", ".h5"])
def test_one_wrong_number_in_the_written_file_is_refused(tmp_path, monkeypatch, suffix):
    """The check loads the file: a wrong number in it is found, also by the rows read back."""
    import h5py

    weights = [("d/kernel:0", KERNEL), ("d/bias:0", BIAS)]
    parallel = old_files.parallel_weights(tmp_path / "old.h5", weights)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="d")])
    np.savez(tmp_path / "io.npz", x0=X, y0=X @ KERNEL + BIAS)
    new, check = tmp_path / f"new{suffix}", tmp_path / "io.npz"
    assert lockstep.rescue(parallel, new, model=model, check=check).difference < 1e-5
    write = write_module.write

    def damaged(old, found, suffix, state, path):
        result = write(old, found, suffix, state, path)
        with archive_of(path) as folder, h5py.File(folder, "r+") as handle:
            handle.visititems(flip)
        return result

    monkeypatch.setattr(write_module, "write", damaged)
    with pytest.raises(OutputMismatch, match="differ from the expected"):
        lockstep.rescue(parallel, new, model=model, check=check)


@contextmanager
def archive_of(path):
    """The HDF5 file in a `.keras` archive, which is written again; or the file itself."""
    if not zipfile.is_zipfile(path):
        yield path
        return
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    inner = f"{path}.inner.h5"
    with open(inner, "wb") as file:
        file.write(parts["model.weights.h5"])
    yield inner
    with open(inner, "rb") as file:
        parts["model.weights.h5"] = file.read()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


def flip(_, item):
    if getattr(item, "shape", None) == KERNEL.shape:
        item[0, 0] += 1


@pytest.mark.parametrize("given", [1, 3])
def test_another_number_of_outputs_is_said(tmp_path, given):
    """It was called a difference of 0, more than 1e-05."""
    y = X @ KERNEL + BIAS
    np.savez(tmp_path / "io.npz", x0=X, **{f"y{n}": y for n in range(given)})
    inputs = keras.Input((4,))
    two = keras.Model(inputs, [keras.layers.Dense(2)(inputs) for _ in range(2)])
    inputs, outputs = outputs_check.inputs_and_outputs(tmp_path / "io.npz")
    with pytest.raises(OutputMismatch, match=f"has 2 outputs, but {given} were given"):
        outputs_check.difference(two, inputs, outputs)


@pytest.mark.parametrize("y", [np.zeros((0, 2), "float32"), np.full((3, 2), np.nan, "float32")])
def test_expected_outputs_without_a_number_prove_nothing(y, tmp_path):
    with pytest.raises(UnreadableFile, match="nothing to compare"):
        checked(tmp_path, 1, X * np.nan if y.size else X[:0], y)


def one_array(path):
    np.save(path.with_suffix(".npy"), X)
    path.with_suffix(".npy").rename(path)


def cut(path):
    np.savez(path, x0=X, y0=X)
    path.write_bytes(path.read_bytes()[:200])


def overwritten(path):
    np.savez(path, x0=X, y0=X)
    path.write_bytes(path.read_bytes()[:60] + bytes(140) + path.read_bytes()[200:])


def text(path):
    np.savez(path, x0=X, y0=np.array(["a"]))


@pytest.mark.parametrize("write", [one_array, cut, overwritten, text])
def test_inputs_that_are_no_arrays_are_refused(tmp_path, write):
    write(tmp_path / "io.npz")
    with pytest.raises(UnreadableFile, match=r"io\.npz"):
        outputs_check.inputs_and_outputs(tmp_path / "io.npz")


@pytest.mark.parametrize("kind", ["missing", "folder", "no text"])
def test_a_config_that_cannot_be_read_is_a_message(tmp_path, kind):
    weights = [("d/kernel:0", KERNEL), ("d/bias:0", BIAS)]
    parallel = old_files.parallel_weights(tmp_path / "old.h5", weights)
    config = tmp_path / "config.json"
    if kind == "folder":
        config.mkdir()
    elif kind == "no text":
        config.write_bytes(b"\xff\xfe\x00")
    command = ["rescue", parallel, "-o", tmp_path / "new.keras", "--config", config]
    done = CliRunner().invoke(main, [str(part) for part in command])
    assert (done.exit_code, done.output.splitlines()[0][:16]) == (1, "UnreadableFile: "), done
    assert "config.json" in done.output
