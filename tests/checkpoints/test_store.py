"""A checkpoint on disk is complete or absent, and what is read is what was written."""

import errno
import json
import os
import shutil
import warnings

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from lockstep import errors
from lockstep.checkpoint import array_file
from lockstep.checkpoint.array_file import Entry
from lockstep.checkpoint.run_folder import Retention, RunFolder
from lockstep.core.files import CHUNK
from tests.checkpoints.cutting import CHANGING, Cutting, cut_at


def some(value=1.0):
    return {
        "weights/dense/kernel": np.full((300, 7), value, "float32"),
        "scalar": np.array(value, "float64"),
        "empty": np.zeros((0, 3), "int32"),
        "half": np.full((5,), value, ml_dtypes.bfloat16),
        "flags": np.array([True, False]),
        "seed": np.array([2**31 + 1, 7], "uint32"),
    }


def save(folder, value=1.0, **state):
    arrays = some(value)
    entries = [Entry(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    return folder.save(
        "epoch-0001-step-000001", {"value": value, **state}, entries, arrays.values()
    )


def newest(folder):
    """The newest whole checkpoint, after which no damaged one is passed over."""
    found = folder.newest(lambda words: pytest.fail(words))
    expected = some(found.state["value"])
    assert found.arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)
    return found.state["value"]


def test_what_is_read_is_what_was_written(tmp_path):
    folder = RunFolder(tmp_path / "deep" / "run")
    assert folder.newest(pytest.fail) is None
    save(folder, 1.0)
    save(folder, 2.0)
    assert newest(folder) == 2.0
    assert len(folder.checkpoints()) == 2


def test_the_arrays_are_read_by_the_library_of_the_format(tmp_path):
    path = save(RunFolder(tmp_path))
    arrays = load_file(path / "arrays.safetensors")
    for name, array in some().items():
        np.testing.assert_array_equal(arrays[name], array)


def test_the_arrays_are_read_with_json_and_numpy_alone(tmp_path):
    """As docs/checkpoints.md shows it."""
    path = save(RunFolder(tmp_path))
    raw = (path / "arrays.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])["weights/dense/kernel"]
    start, end = header["data_offsets"]
    kernel = np.frombuffer(raw[8 + length :][start:end], "<f4").reshape(header["shape"])
    np.testing.assert_array_equal(kernel, some()["weights/dense/kernel"])


def run_of_two(path):
    folder = RunFolder(path)
    save(folder, 1.0)
    save(folder, 2.0)
    return folder


def save_and_keep(folder, value):
    save(folder, value)
    folder.keep(folder.checkpoints()[:1])


def calls_of_a_save(tmp_path, monkeypatch):
    folder = run_of_two(tmp_path / "counted")
    with monkeypatch.context() as patch:
        counting = Cutting(patch, at=10**9)
        save_and_keep(folder, 3.0)
    return counting.calls


@pytest.mark.parametrize("chunk", [CHUNK, 4096])  # an array in one piece, or in three
def test_a_cut_at_any_change_of_the_file_system_leaves_a_good_checkpoint(
    tmp_path, monkeypatch, chunk
):
    monkeypatch.setattr(array_file, "CHUNK", chunk)
    calls = calls_of_a_save(tmp_path, monkeypatch)
    assert set(calls) == {*CHANGING} - {"replace"}
    for at in range(len(calls)):
        folder = run_of_two(tmp_path / f"cut-{at}")
        with cut_at(at):
            save_and_keep(folder, 3.0)
        renamed = "rename" in calls[:at]
        assert newest(folder) == (3.0 if renamed else 2.0), calls[at]
        save_and_keep(folder, 4.0)
        assert newest(folder) == 4.0
        assert len(os.listdir(folder.path)) == 2, "the mark and one checkpoint"


def test_a_cut_of_the_very_first_save_leaves_nothing_or_a_checkpoint(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        counting = Cutting(patch, at=10**9)
        save(RunFolder(tmp_path / "counted"))
    for at in range(len(counting.calls)):
        folder = RunFolder(tmp_path / f"cut-{at}")
        with cut_at(at):
            save(folder)
        found = folder.newest(pytest.fail)
        assert (found is not None) == (at == len(counting.calls) - 1), counting.calls[at]
        save(folder, 2.0)
        assert newest(folder) == 2.0


@pytest.mark.parametrize("number", [errno.ENOSPC])
def test_a_disk_that_takes_no_more_leaves_the_checkpoint_before(tmp_path, monkeypatch, number):
    calls = calls_of_a_save(tmp_path, monkeypatch)
    for at in range(calls.index("rename")):
        folder = run_of_two(tmp_path / f"full-{at}")
        with cut_at(at, OSError(number, "disk")):
            save(folder, 3.0)
        assert newest(folder) == 2.0
        save(folder, 4.0)
        assert newest(folder) == 4.0


@pytest.mark.parametrize("file", ["arrays.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_a_damaged_newest_one_is_told_and_the_one_before_is_used(tmp_path, file, damage):
    folder = run_of_two(tmp_path)
    path = folder.checkpoints()[0] / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"flip": content, "cut": content[:-9], "empty": b""}[damage])
    said = []
    assert folder.newest(said.append).state["value"] == 1.0
    (words,) = said
    assert file in words
    assert folder.checkpoints()[1].name in words


def test_every_single_byte_of_the_arrays_counts(tmp_path):
    folder = RunFolder(tmp_path)
    path = save(folder) / "arrays.safetensors"
    content = path.read_bytes()
    for position in range(0, len(content), 97):
        changed = bytearray(content)
        changed[position] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises(errors.DamagedCheckpoint):
            folder.newest(pytest.fail)
    path.write_bytes(content)
    assert newest(folder) == 1.0


def test_where_none_is_whole_nothing_is_started_anew(tmp_path):
    folder = run_of_two(tmp_path)
    for path in folder.checkpoints():
        (path / "manifest.json").unlink()
    with pytest.raises(errors.DamagedCheckpoint, match="all are damaged"):
        folder.newest(pytest.fail)


def test_a_newer_format_is_refused_and_not_passed_over(tmp_path):
    folder = run_of_two(tmp_path)
    path = folder.checkpoints()[0] / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(
        errors.NewerCheckpoint, match="format version 2, but this version of lockstep reads"
    ):
        folder.newest(pytest.fail)
    mark = tmp_path / "lockstep.json"
    mark.write_text(mark.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(errors.NewerCheckpoint):
        folder.open()


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(errors.NotARun, match=r"contains 'thesis.tex'"):
        RunFolder(tmp_path).open()
    assert os.listdir(tmp_path) == ["thesis.tex"]
    (tmp_path / "lockstep.json").write_text("[1]")
    with pytest.raises(errors.NotARun, match=r"lockstep.json"):
        RunFolder(tmp_path).open()


def test_other_files_may_join_a_run(tmp_path):
    folder = run_of_two(tmp_path)
    (tmp_path / "log.csv").write_text("epoch,loss\n")
    (tmp_path / "plots").mkdir()
    save_and_keep(folder, 3.0)
    assert newest(folder) == 3.0
    assert (tmp_path / "plots").is_dir()


def test_the_newest_few_and_the_best_stay(tmp_path):
    folder = RunFolder(tmp_path)
    for mode, order in (("min", [3.0, 1.0, 2.0, 4.0, 1.0]), ("max", [3.0, 9.0, 2.0, 4.0, 9.0])):
        retention = Retention(keep=2, best=True)
        for value in order:
            state = {"monitor": {"name": "val_loss", "value": value, "mode": mode}}
            retention.note(save(folder, value, **state), state)
            folder.keep(retention.staying(folder.checkpoints()))
        values = [folder.read(path).state["value"] for path in folder.checkpoints()]
        assert values == [order[4], order[3], order[1]]
        shutil.rmtree(tmp_path)


def test_a_monitored_nan_is_never_the_best(tmp_path):
    retention = Retention(keep=1, best=True)
    paths = [tmp_path / "b", tmp_path / "a"]
    for path, value in zip(paths, [float("nan"), 2.0], strict=True):
        retention.note(path, {"monitor": {"name": "loss", "value": value, "mode": "min"}})
    assert retention.best_of(paths) == paths[1]


def test_nothing_is_warned_about(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_of_two(tmp_path)
