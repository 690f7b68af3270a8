"""A rescue that cannot end: the output is as it was, and nothing else is left."""

import shutil
import signal
from collections import namedtuple
from pathlib import Path

import pytest

import lockstep
from lockstep.errors import UnsuitableOutput
from lockstep.rescue import write

OLD = Path(__file__).parents[1] / "files" / "legacy" / "keras-2.2.4__mlp4-g2" / "parallel_full.h5"


@pytest.fixture
def output(tmp_path):
    path = tmp_path / "new.keras"
    path.write_bytes(b"precious")
    yield path
    assert [one.name for one in tmp_path.iterdir()] == ["new.keras"]
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize("step", ["as_dtype", "_compare"])
def test_an_interrupt_ends_it_before_anything_appears(step, output, monkeypatch):
    """Ctrl-C while Keras writes the file, or while it is read back."""
    done = getattr(write, step)

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return done(*arguments)

    monkeypatch.setattr(write, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        lockstep.rescue(OLD, output)


def test_a_disk_without_room_is_a_message_before_anything_is_written(output, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(2**20, 2**20 - 40960, 40960))
    with pytest.raises(UnsuitableOutput, match=r"bytes, but only 40,960 are free in "):
        lockstep.rescue(OLD, output)
