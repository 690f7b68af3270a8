"""Damaged and hostile files: an error of ours, and nothing else happens."""

import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import lockstep
from lockstep.errors import HostileFile, OldFileError, UnreadableFile, UnsuitableOutput
from lockstep.rescue import probe
from tests.rescue import old_files

LEGACY = Path(__file__).parents[1] / "files" / "legacy"
GOOD = LEGACY / "keras-2.2.4__mlp4-g2" / "parallel_full.h5"


def copy_of(path, tmp_path):
    copy = tmp_path / "old.h5"
    copy.write_bytes(path.read_bytes())
    return copy


def refused(path, tmp_path, kind=OldFileError, said=None):
    """Both doors refuse, in at most three lines, and nothing is left behind."""
    before = set(os.listdir(tmp_path))
    with pytest.raises(kind, match=said) as caught:
        lockstep.rescue(path, tmp_path / "new.keras")
    assert len(str(caught.value).splitlines()) <= 3
    assert set(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.99])
def test_a_file_that_is_cut_short_is_refused(share, tmp_path):
    path = tmp_path / "old.h5"
    content = GOOD.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    refused(path, tmp_path, UnreadableFile)


def test_an_external_link_is_not_followed(tmp_path):
    secret = copy_of(GOOD, tmp_path).rename(tmp_path / "secret.h5")
    path = tmp_path / "old.h5"
    with h5py.File(path, "w") as root:
        root["model_weights"] = h5py.ExternalLink(str(secret), "/model_weights")
        root.attrs["keras_version"] = "2.2.4"
    refused(path, tmp_path, HostileFile, "ExternalLink")


def test_a_soft_link_loop_is_not_followed(tmp_path):
    path = copy_of(GOOD, tmp_path)
    with h5py.File(path, "a") as root:
        del root["model_weights/sequential_1"]
        root["model_weights/sequential_1"] = h5py.SoftLink("/model_weights/sequential_1")
    refused(path, tmp_path, HostileFile, "SoftLink")


def test_a_group_that_holds_itself_does_not_hang(tmp_path):
    path = tmp_path / "old.weights.h5"
    with h5py.File(path, "w") as root:
        root["layers/a/vars/0"] = np.ones(2)
        root["layers/a/self"] = root["layers"]
    found = lockstep.inspect(path)
    assert found.arrays
    assert len(found.arrays) < 100


def test_an_array_in_another_file_is_not_read(tmp_path):
    path = copy_of(GOOD, tmp_path)
    (tmp_path / "raw").write_bytes(bytes(6 * 8 * 4))
    with h5py.File(path, "a") as root:
        group = root["model_weights/sequential_1/dense_1"]
        del group["kernel:0"]
        group.create_dataset("kernel:0", (6, 8), "f4", external=[(str(tmp_path / "raw"), 0, 192)])
    refused(path, tmp_path, HostileFile, "another file")


def test_a_virtual_array_is_not_read(tmp_path):
    path = copy_of(GOOD, tmp_path)
    layout = h5py.VirtualLayout((6, 8), "f4")
    layout[:] = h5py.VirtualSource(str(GOOD), "model_weights/sequential_1/dense_1/kernel:0", (6, 8))
    with h5py.File(path, "a") as root:
        group = root["model_weights/sequential_1/dense_1"]
        del group["kernel:0"]
        group.create_virtual_dataset("kernel:0", layout)
    refused(path, tmp_path, HostileFile, "another file")


@pytest.mark.parametrize("chunks", [None, (1024, 1024)])
def test_a_declared_size_that_is_not_there_is_not_allocated(chunks, tmp_path):
    path = copy_of(GOOD, tmp_path)
    with h5py.File(path, "a") as root:
        group = root["model_weights/sequential_1/dense_1"]
        del group["kernel:0"]
        group.create_dataset("kernel:0", (2**20, 2**20), "f4", chunks=chunks)
    refused(path, tmp_path, HostileFile, "declares 4,398,046,511,104 bytes and stores 0")


def test_an_attribute_bomb_is_not_unfolded(tmp_path):
    path = tmp_path / "old.h5"
    with h5py.File(path, "w") as root:
        root.attrs["keras_version"] = "2.2.4"
        text = h5py.string_dtype()
        root.attrs.create("layer_names", ["x" * 2000] * 3000, dtype=text)
    refused(path, tmp_path, OldFileError)


def test_an_array_of_text_is_refused(tmp_path):
    path = copy_of(GOOD, tmp_path)
    with h5py.File(path, "a") as root:
        group = root["model_weights/sequential_1/dense_1"]
        del group["bias:0"]
        group["bias:0"] = np.array([b"abcd"] * 8)
    refused(path, tmp_path, HostileFile, "no numbers")


def set_config(path, config):
    with h5py.File(path, "a") as root:
        del root.attrs["model_config"]
        root.attrs["model_config"] = config if isinstance(config, str) else json.dumps(config)
    return path


@pytest.mark.parametrize(
    "config",
    [
        "{" * 20,
        "[]",
        "null",
        "{}",
        '{"class_name": 3, "config": 4}',
        '{"class_name": "Model", "config": {"layers": 7, "input_layers": [], "output_layers": []}}',
        '{"class_name": "Sequential", "config": []}',
        '{"class_name": "Sequential", "config": [1, 2]}',
        '{"class_name": "Sequential", "config": {"layers": [{"class_name": "Dense"}]}}',
        "[" * 20000,
    ],
)
def test_configs_that_are_none_are_refused(config, tmp_path):
    refused(set_config(copy_of(GOOD, tmp_path), config), tmp_path)


@pytest.mark.parametrize(
    ("class_name", "settings"),
    [
        ("Dense", {"units": 10**15}),
        ("Dense", {"units": -3}),
        ("Dense", {"units": "__import__('os').system('true')"}),
        ("Dense", {"units": [1, 2]}),
        ("Dense", {"units": 8, "activation": {"class_name": "os.system", "config": "true"}}),
        ("Dense", {"units": 8, "kernel_initializer": {"class_name": "Lambda", "config": {}}}),
        ("RepeatVector", {"n": 10**12}),
        ("Reshape", {"target_shape": [10**9, 10**9]}),
        ("Embedding", {"input_dim": 10**12, "output_dim": 10**6}),
        ("LSTM", {"units": 10**9, "unroll": True}),
        ("TimeDistributed", {"layer": {"class_name": "Dense"}}),
        ("Bidirectional", {"layer": 3}),
        ("Model", {"layers": []}),
        ("VeryUnknown", {}),
    ],
)
def test_absurd_configs_end_in_an_error(class_name, settings, tmp_path):
    template = old_files.sequential([(class_name, {"name": "x", **settings})], (None, 6))
    path = old_files.parallel_full(
        tmp_path / "old.h5", template, [("x/kernel:0", np.ones((6, 8), "float32"))],
        shapes=((None, 6),),
    )  # fmt: skip
    refused(path, tmp_path)


def test_code_in_the_file_never_runs(tmp_path):
    """Lambda bytecode, functions by name, and a pickle where a config should be."""
    mark = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(mark),)

    template = old_files.sequential(
        [
            ("Dense", {"units": 8, "name": "d"}),
            ("Lambda", {"name": "l", "function": [pickle.dumps(Bomb()).hex(), None, None],
                        "function_type": "lambda"}),
            ("Lambda", {"name": "m", "function": "system", "function_type": "function",
                        "module": "os"}),
        ],
        (None, 6),
    )  # fmt: skip
    path = old_files.parallel_full(
        tmp_path / "old.h5", template, [("d/kernel:0", np.ones((6, 8), "float32"))]
    )
    refused(path, tmp_path, lockstep.errors.NeedsCode, "'l'.*'m'|'m'.*'l'")
    assert not mark.exists()


def test_a_pytorch_file_with_code_in_it_is_not_run(tmp_path):
    torch = pytest.importorskip("torch")
    mark = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(mark),)

    torch.save({"state_dict": Bomb()}, tmp_path / "bad.pt")
    with pytest.raises(UnreadableFile, match="never run here"):
        lockstep.inspect(tmp_path / "bad.pt")
    assert not mark.exists()


def test_names_cannot_leave_the_output(tmp_path):
    """Weight names with .. or an absolute path stay names inside the file."""
    inside = tmp_path / "inside"
    inside.mkdir()
    path = old_files.parallel_weights(
        inside / "old.h5", [("../../../etc/x/kernel:0", np.ones((2, 2), "float32"))]
    )
    with pytest.raises(OldFileError):
        lockstep.rescue(path, inside / "new.safetensors")
    assert os.listdir(tmp_path) == ["inside"]
    assert os.listdir(inside) == ["old.h5"]


def test_a_file_on_which_hdf5_hangs_is_refused(tmp_path, monkeypatch):
    """A flipped bit in a global heap makes libhdf5 loop; found by fuzzing."""
    monkeypatch.setattr(probe, "SECONDS", 3)
    refused(LEGACY.parent / "hostile" / "heap_loop.h5", tmp_path, HostileFile, "not end within 3")


def test_random_damage_is_an_error_or_a_proven_rescue(tmp_path, monkeypatch):
    """A short run of the fuzzer; `python -m tests.rescue.fuzz` runs as long as you like."""
    monkeypatch.setattr(probe, "SECONDS", 5)
    from tests.rescue import fuzz

    outcome = fuzz.run(random.Random(2), 25, tmp_path)
    assert outcome["rescued"] + outcome["refused"] == 25


def test_the_output_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    output = tmp_path / "new.keras"
    output.write_bytes(b"the previous one")
    from lockstep.rescue import stream

    copied = []

    def fails(*args):
        copied.append(args)
        if len(copied) == 3:
            raise OSError(28, "No space left on device")
        return original(*args)

    original = stream.copy
    monkeypatch.setattr(stream, "copy", fails)
    with pytest.raises(UnsuitableOutput, match="No space left"):
        lockstep.rescue(GOOD, output)
    assert output.read_bytes() == b"the previous one"
    assert os.listdir(tmp_path) == ["new.keras"]


def test_a_killed_rescue_leaves_the_previous_file(tmp_path):
    output = tmp_path / "new.keras"
    output.write_bytes(b"the previous one")
    script = (
        "import os, lockstep\n"
        "from lockstep.rescue.front import rescue\n"
        "from lockstep.rescue import whole\n"
        "whole.os.replace = lambda *paths: os.kill(os.getpid(), 9)\n"
        f"rescue({str(GOOD)!r}, {str(output)!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == -9
    assert output.read_bytes() == b"the previous one"


def test_the_old_file_is_never_overwritten(tmp_path):
    path = copy_of(GOOD, tmp_path)
    with pytest.raises(UnsuitableOutput, match="never overwritten"):
        lockstep.rescue(path, path)
    link = tmp_path / "link.h5"
    link.hardlink_to(path)
    with pytest.raises(UnsuitableOutput, match="never overwritten"):
        lockstep.rescue(path, link)
    assert path.read_bytes() == GOOD.read_bytes()


@pytest.mark.parametrize("output", ["new.txt", "missing/new.keras", ""])
def test_places_that_cannot_hold_the_output_are_named(output, tmp_path):
    with pytest.raises(UnsuitableOutput):
        lockstep.rescue(GOOD, tmp_path / output)
