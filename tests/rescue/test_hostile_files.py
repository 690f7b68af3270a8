"""Damaged and hostile files: an error of ours, and nothing else happens."""

import json
import os
import pickle
import random
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest

import lockstep
from lockstep.errors import HostileFile, OldFileError, UnreadableFile, UnsuitableOutput
from lockstep.rescue import outputs_check, write
from tests.rescue import hostile, old_files
from tests.rescue.old_files import LEGACY

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


def test_a_group_that_holds_itself_is_refused(tmp_path):
    path = tmp_path / "old.weights.h5"
    with h5py.File(path, "w") as root:
        root["layers/a/vars/0"] = np.ones(2)
        root["layers/a/self"] = root["layers"]
    with pytest.raises(HostileFile, match="under two names"):
        lockstep.inspect(path)


def test_an_array_in_another_file_is_not_read(tmp_path):
    path = copy_of(GOOD, tmp_path)
    (tmp_path / "raw").write_bytes(bytes(6 * 8 * 4))
    with h5py.File(path, "a") as root:
        group = root["model_weights/sequential_1/dense_1"]
        del group["kernel:0"]
        group.create_dataset("kernel:0", (6, 8), "f4", external=[(str(tmp_path / "raw"), 0, 192)])
    refused(path, tmp_path, HostileFile, "an external file")


def test_a_virtual_array_is_not_read(tmp_path):
    path = copy_of(GOOD, tmp_path)
    layout = h5py.VirtualLayout((6, 8), "f4")
    layout[:] = h5py.VirtualSource(str(GOOD), "model_weights/sequential_1/dense_1/kernel:0", (6, 8))
    with h5py.File(path, "a") as root:
        group = root["model_weights/sequential_1/dense_1"]
        del group["kernel:0"]
        group.create_virtual_dataset("kernel:0", layout)
    refused(path, tmp_path, HostileFile, "an external file")


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
    refused(path, tmp_path, HostileFile, "instead of numbers")


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


@pytest.mark.thorough
def test_a_file_on_which_hdf5_hangs_is_refused(tmp_path):
    """A flipped bit in a global heap makes libhdf5 loop; found by fuzzing."""
    refused(LEGACY.parent / "hostile" / "heap_loop.h5", tmp_path, HostileFile, "not end within 5")


@pytest.mark.whole
def test_random_damage_is_an_error_or_a_proven_rescue(tmp_path):
    """A short run of the fuzzer; `python -m tests.rescue.fuzz` runs as long as you like."""
    from tests.rescue import fuzz

    outcome = fuzz.run(random.Random(2), 25, tmp_path)
    assert outcome["rescued"] + outcome["refused"] == 25


def test_the_output_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    output = tmp_path / "new.keras"
    output.write_bytes(b"the previous one")
    copied = []

    def fails(*args):
        copied.append(args)
        if len(copied) == 3:
            raise OSError(28, "No space left on device")
        return original(*args)

    original = write.as_dtype
    monkeypatch.setattr(write, "as_dtype", fails)
    with pytest.raises(UnsuitableOutput, match="No space left"):
        lockstep.rescue(GOOD, output)
    assert output.read_bytes() == b"the previous one"
    assert os.listdir(tmp_path) == ["new.keras"]


@pytest.mark.thorough
def test_a_killed_rescue_leaves_the_previous_file(tmp_path):
    output = tmp_path / "new.keras"
    output.write_bytes(b"the previous one")
    script = (
        "import os, lockstep\n"
        "from lockstep.rescue.api import rescue\n"
        "from lockstep.rescue import write\n"
        "write.files.os.replace = lambda *paths: os.kill(os.getpid(), 9)\n"
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


LIMITED = """
import atexit, os, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
@atexit.register
def peak():
    own, probe = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    with open("/proc/self/status") as status:  # ru_maxrss begins with that of the parent process
        kilobytes = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    with open(os.environ["USED"], "w") as file:
        for used, memory in ((own, kilobytes), (probe, probe.ru_maxrss)):
            print(memory // 1024, used.ru_utime + used.ru_stime, file=file)
from lockstep.cli import main
main()
"""


def limited(tmp_path, *command):
    """Run a command in at most 10 s of processor time and 1 GB; its status and output."""
    used = tmp_path / "used.txt"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, command)],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "USED": str(used), "LOCKSTEP_REHEARSE": "", "XLA_FLAGS": ""},
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert used.exists(), f"it was ended after 10 s: {output[-500:]}"
    megabytes, seconds = zip(
        *([float(n) for n in line.split()] for line in used.read_text().splitlines()), strict=True
    )
    print(f"{max(megabytes):.0f} MB, {sum(seconds):.1f} s of processor time")
    assert max(megabytes) < 1024
    assert "Traceback" not in output
    assert not {"\x1b", "\x07"} & set(output)
    return done.returncode, output


def cases(kinds, quick=None):
    """Each file with its suffix; with `quick`, the files after so many are thorough."""
    every = [(suffix, make) for suffix, some in kinds.items() for make in some]
    marks = [[] if quick is None or n < quick else pytest.mark.thorough for n in range(len(every))]
    return [
        pytest.param(suffix, make, id=make.__name__, marks=mark)
        for (suffix, make), mark in zip(every, marks, strict=True)
    ]


@pytest.mark.parametrize(("suffix", "make"), cases(hostile.REFUSED, quick=2))
def test_hostile_files_are_refused_in_words_within_limits(suffix, make, tmp_path):
    make(path := tmp_path / f"old{suffix}")
    status, output = limited(tmp_path, "rescue", path, "-o", tmp_path / "new.keras")
    assert status == 1
    assert output.startswith(("HostileFile: ", "UnreadableFile: ", "IncompleteFile: ",
                              "UntranslatableModel: "))  # fmt: skip
    assert len(output.splitlines()) <= 3
    assert not (tmp_path / "new.keras").exists()


@pytest.mark.parametrize(("suffix", "make"), cases(hostile.READ))
def test_odd_files_are_read(suffix, make, tmp_path):
    make(path := tmp_path / f"old{suffix}")
    status, output = limited(tmp_path, "inspect", path)
    assert (status, "next: " in output) == (0, True), output


@pytest.mark.parametrize("make", hostile.CHECKS, ids=lambda make: make.__name__)
def test_broken_files_for_check_are_refused(make, tmp_path):
    make(path := tmp_path / "io.npz")
    with pytest.raises(UnreadableFile, match=r"io\.npz cannot be read as an \.npz"):
        outputs_check.inputs_and_outputs(str(path))


@pytest.mark.whole
def test_terminal_escapes_in_names_are_shown_escaped(tmp_path):
    name = f"d{hostile.ESCAPE}"
    old = old_files.parallel_weights(
        tmp_path / "old.h5", [(f"{name}/kernel:0", np.ones((2, 2), "float32"))], inner=name
    )
    status, output = limited(tmp_path, "inspect", old)
    assert status == 0
    assert r"d\x1b]0;owned\x07\x1b[2J[bold]" in output
    status, output = limited(tmp_path, "rescue", old, "-o", tmp_path / "new.safetensors")
    assert status == 0
    assert r"\x1b[2J[bold]" in output
    with pytest.raises(OldFileError, match=r"\\x1b") as caught:
        lockstep.rescue(old, tmp_path / "new.keras", config=old_files.sequential(
            [old_files.dense(3)], (None, 2)))  # fmt: skip
    assert "\x1b" not in str(caught.value)


@pytest.mark.whole
def test_a_flat_model_of_1001_layers_is_rescued(tmp_path):
    """Keras calls itself once for each layer, and Python stops it at 1,000."""
    hostile.many_layers(tmp_path / "old.h5", 1000)
    before = sys.getrecursionlimit()
    report = lockstep.rescue(tmp_path / "old.h5", tmp_path / "new.keras")
    assert sys.getrecursionlimit() == before
    assert len(report.rows) == 2
    assert any("sys.setrecursionlimit(2602)" in note for note in report.notes)
    with zipfile.ZipFile(tmp_path / "new.keras") as archive:
        config = json.loads(archive.read("config.json"))["config"]
        with archive.open("model.weights.h5") as inner, h5py.File(inner) as weights:
            np.testing.assert_array_equal(weights["layers/dense/vars/0"][()], np.eye(6))
    names = [layer["config"]["name"] for layer in config["layers"]]
    assert names[1:] == ["d", *(f"a{n}" for n in range(1000))]


def test_three_names_of_variable_length_in_a_large_file_are_read(tmp_path):
    old = tmp_path / "old.h5"
    with h5py.File(old, "w") as root:
        root.attrs["keras_version"] = b"2.2.4"
        root.attrs.create("layer_names", ["a", "b", "c"], dtype=h5py.string_dtype())
        for name in "abc":
            old_files.group(root, name, [(f"{name}/kernel:0", np.ones((2500, 2500), "float32"))])
    assert len(lockstep.inspect(old).arrays) == 3
