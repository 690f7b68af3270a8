"""A file is replaced whole or not at all."""

import os
import time

import pytest

from lockstep.core.files import is_temporary, replacing, write_file
from tests.checkpoints.cutting import Cut, Cutting, cut_at


def replace(path, content):
    with replacing(path) as temporary:
        temporary.write_bytes(content[:3])
        with temporary.open("ab") as file:
            file.write(content[3:])


def calls_of_a_replacement(path, monkeypatch):
    with monkeypatch.context() as patch:
        counting = Cutting(patch, at=10**9)
        replace(path, b"second")
    return counting.calls


@pytest.mark.parametrize("before", [b"first", None])
def test_a_cut_at_any_change_leaves_the_old_content_or_the_new(before, tmp_path, monkeypatch):
    calls = calls_of_a_replacement(tmp_path / "counted", monkeypatch)
    assert calls[-2:] == ["replace", "fsync"]  # then the folder is synced
    assert calls.index("fsync") < calls.index("replace")
    for at in range(len(calls)):
        path = tmp_path / f"cut-{at}"
        if before is not None:
            path.write_bytes(before)
        with cut_at(at):
            replace(path, b"second")
        found = path.read_bytes() if path.exists() else None
        assert found == (b"second" if "replace" in calls[:at] else before), calls[at]
        replace(path, b"third")
        assert path.read_bytes() == b"third"
        assert not any(is_temporary(name, path) for name in os.listdir(tmp_path))


def test_what_fails_leaves_nothing_behind(tmp_path):
    path = tmp_path / "model.weights.h5"
    path.write_bytes(b"first")

    def fail():
        with replacing(path) as temporary:
            assert temporary.parent == path.parent
            assert temporary.name.endswith(".weights.h5")
            temporary.write_bytes(b"half")
            raise Cut

    with pytest.raises(Cut):
        fail()
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == [path.name]


def test_what_a_kill_has_left_is_removed_once_nobody_can_write_it(tmp_path):
    path = tmp_path / "page.html"
    with replacing(path) as old, replacing(path) as new:
        old.write_bytes(b"left")
        new.write_bytes(b"being written")
        two_hours_ago = time.time() - 7200
        os.utime(old, (two_hours_ago, two_hours_ago))
        replace(path, b"third")
        assert sorted(os.listdir(tmp_path)) == [new.name, path.name]
        assert path.read_bytes() == b"third"
        old.touch()


def test_two_replacements_at_once_do_not_mix(tmp_path):
    path = tmp_path / "single.keras"
    with replacing(path) as first:
        first.write_bytes(b"first ")
        replace(path, b"second")
        assert path.read_bytes() == b"second"
        with first.open("ab") as file:
            file.write(b"half")
    assert path.read_bytes() == b"first half"
    assert os.listdir(tmp_path) == [path.name]


def test_a_system_that_takes_a_part_of_every_write_gets_every_byte_once(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:1000]))
    content = os.urandom(30_000)
    write_file(tmp_path / "file", [content[:3], b"", content[3:8192], content[8192:]])
    assert (tmp_path / "file").read_bytes() == content
