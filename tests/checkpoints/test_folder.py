"""A folder in which not all is as it should be: others write, files stay, one is damaged."""

import errno
import os
import stat

import pytest

from lockstep import errors
from lockstep.checkpoint.callback import Checkpoint
from lockstep.checkpoint.export import export_model
from lockstep.checkpoint.folder_lock import only_writer
from lockstep.checkpoint.run_folder import Retention, RunFolder
from lockstep.core.files import sync_folder
from tests.checkpoints.data import arrays
from tests.checkpoints.runs import train
from tests.checkpoints.test_saving import names
from tests.checkpoints.test_store import newest, save, save_and_keep
from tests.processes.common import python


def damage(path):
    (path / "manifest.json").write_text("{}")


def test_what_cannot_be_removed_is_in_nobody_s_way(tmp_path):
    """Found by a folder of plots in a checkpoint: every save after it failed."""
    folder = RunFolder(tmp_path)
    (save(folder, 1.0) / "plots").mkdir()
    for value in (2.0, 3.0, 4.0):
        save_and_keep(folder, value)
        assert newest(folder) == value
    assert "plots" in folder.left_over
    assert len(folder.checkpoints()) == 1


def test_and_is_told_once(tmp_path):
    train(arrays, tmp_path, epochs=1, checkpoint={})
    (RunFolder(tmp_path).checkpoints()[0] / "plots").mkdir()
    with pytest.warns(errors.CheckpointWarning, match="could not be removed") as told:
        train(arrays, tmp_path, epochs=4, checkpoint={"keep": 1})
    assert len([each for each in told if each.category is errors.CheckpointWarning]) == 1
    assert names(tmp_path) == ["epoch-0004-step-000000"]


def test_two_that_save_at_once_never_leave_a_mixture(tmp_path):
    one, other = RunFolder(tmp_path), RunFolder(tmp_path)
    save(one, 1.0)
    names = {one._aside("writing-00000002"), other._aside("writing-00000002")}
    assert len(names) == 2
    assert all(str(os.getpid()) in name.name for name in names)


WRITING = """
from pathlib import Path
from lockstep.checkpoint.folder_lock import only_writer
from lockstep.errors import CheckpointError
try:
    with only_writer(Path({folder!r})):
        print("wrote")
except CheckpointError as error:
    print(error)
"""


def test_two_processes_do_not_write_into_one_folder(tmp_path):
    script = WRITING.format(folder=str(tmp_path))
    with only_writer(tmp_path):
        text = python(script)
        assert f"process {os.getpid()} on " in text
        assert len(text.splitlines()) <= 3
    assert python(script) == "wrote"
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks_has_none(tmp_path, monkeypatch):
    def lockf(*args):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.lockf", lockf)
    with only_writer(tmp_path):
        pass


def test_a_file_system_that_cannot_sync_folders_takes_checkpoints(tmp_path, monkeypatch):
    fsync = os.fsync

    def of_files(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", of_files)
    folder = RunFolder(tmp_path)
    save(folder, 1.0)
    assert newest(folder) == 1.0
    monkeypatch.setattr(os, "fsync", lambda handle: os.close(-1))
    with pytest.raises(OSError, match="Bad file"):
        sync_folder(tmp_path)


# --------------------------------------------------------------------------- the best


def monitored(folder, retention, name, mode, values):
    for value in values:
        said = {"monitor": {"name": name, "value": value, "mode": mode}}
        retention.note(save(folder, value, **said), said)


def test_values_of_another_monitor_are_not_compared(tmp_path):
    folder, retention = RunFolder(tmp_path), Retention(keep=1, best=True)
    monitored(folder, retention, "accuracy", "max", [0.9, 0.8])
    monitored(folder, retention, "val_loss", "min", [1.0, 2.0])
    paths = folder.checkpoints()
    assert retention.staying(paths) == {paths[0], paths[1]}
    assert retention.best_of(paths, {"name": "accuracy", "mode": "max"}) == paths[3]


def test_a_damaged_best_gives_way_to_the_next(tmp_path):
    folder, retention, said = RunFolder(tmp_path), Retention(keep=9, best=True), []
    monitored(folder, retention, "loss", "min", [3.0, 1.0, 2.0])
    damage(folder.checkpoints()[1])
    assert retention.read_best(folder, said.append).state["value"] == 2.0
    assert "was skipped" in said[0]


def test_the_best_is_exported_where_another_one_is_damaged(tmp_path):
    run = tmp_path / "run"
    train(arrays, run, checkpoint={"monitor": "loss", "mode": "min"})
    best = export_model(run, tmp_path / "a.keras", best=True)
    damage(next(path for path in RunFolder(run).checkpoints() if path != best))
    assert export_model(run, tmp_path / "b.keras", best=True) == best
    with pytest.raises(errors.CheckpointError, match="there is no folder"):
        export_model(run, tmp_path / "no" / "where" / "a.keras")


def test_a_reader_takes_the_new_one_where_the_old_one_has_just_gone(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    save(folder, 1.0)
    read = folder.read

    def while_another_saves(path):
        monkeypatch.setattr(folder, "read", read)
        save_and_keep(RunFolder(tmp_path), 2.0)
        return read(path)

    monkeypatch.setattr(folder, "read", while_another_saves)
    assert newest(folder) == 2.0


def test_a_folder_that_another_process_has_just_opened_is_a_run(tmp_path, monkeypatch):
    """The other process of a run writes the mark between two looks of this one."""
    listdir = os.listdir

    def opened_meanwhile(path):
        monkeypatch.setattr(os, "listdir", listdir)
        RunFolder(tmp_path).open()
        return listdir(path)

    monkeypatch.setattr(os, "listdir", opened_meanwhile)
    assert RunFolder(tmp_path).check()


def test_no_number_as_a_loss_leaves_one_to_go_back_to(tmp_path):
    folder, retention = RunFolder(tmp_path), Retention(keep=1, best=False)
    for value, finite in ((1.0, True), (2.0, True), (3.0, False), (4.0, False)):
        state = {"finite": finite}
        retention.note(save(folder, value, **state), state)
        folder.keep(retention.staying(folder.checkpoints()))
    assert [folder.read(path).state["value"] for path in folder.checkpoints()] == [4.0, 2.0]


# ---------------------------------------------------------------------------- its path


def test_the_folder_is_the_one_that_was_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    paths = [Checkpoint(each)._settings.folder for each in ("~/run", "run")]
    assert paths == [tmp_path / "run", tmp_path / "run"]


def test_a_mode_that_nobody_knows_is_told_before_the_first_step(tmp_path):
    with pytest.raises(errors.CheckpointError, match=r"Checkpoint\(monitor=.f1.\) has mode="):
        train(arrays, tmp_path, checkpoint={"monitor": "f1"})
    assert names(tmp_path) == []
