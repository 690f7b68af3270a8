"""What `lockstep doctor` says, and what it finds in environments of its own."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from lockstep.core.package_versions import install_command
from lockstep.tools.doctor import Findings, _torch_build, choose_backend, wrong_pairs
from tests.processes.common import clean_environment, python, warm_python
from tests.tiers import rest

INSTALLED = {"keras": "3.15.1", "jax": "0.10.2"}
ONE = Findings("jax", "KERAS_BACKEND", INSTALLED, devices=(("cpu:0", "cpu"),))
GPUS = tuple((f"gpu:{number}", "NVIDIA H200") for number in range(4))


def changed(**values):
    return dataclasses.replace(ONE, **values)


def test_one_device():
    assert ONE.works
    assert ONE.advice() == (
        "Nothing to change. There is one device; to try several, set LOCKSTEP_REHEARSE=4 before "
        "Python starts."
    )


def test_several_devices():
    found = changed(devices=(*GPUS, ("cpu:0", "cpu")), gpus=4)
    assert found.advice() == "Nothing to change."
    assert dict(found.rows())["CUDA"] == "4 NVIDIA GPUs"


def test_tpus():
    found = changed(devices=(*((f"tpu:{core}", "TPU v3") for core in range(8)), ("cpu:0", "cpu")))
    first, second, third = found.advice().splitlines()
    assert first == "Nothing to change."
    assert second.startswith("Lockstep has not yet been run on a TPU")
    assert third.startswith("lockstep doctor --devices --train first")
    assert "(TPU v3, cpu)" in dict(found.rows())["devices"]


def test_a_backend_that_is_not_installed():
    found = Findings("tensorflow", "Keras's default", INSTALLED, failure="ModuleNotFoundError")
    assert not found.works
    assert found.advice() == (
        "A script that imports Keras fails: tensorflow is not installed.\n"
        "Change: export KERAS_BACKEND=jax"
    )
    assert changed(installed={"jax": None}, devices=()).advice().endswith("pip install jax")


@pytest.mark.parametrize(
    ("noted", "build"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "CPU"),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "CUDA 12.8"),
        ("cuda = None\nhip = '6.4'\n", "ROCm 6.4"),
    ],
)
def test_the_build_of_pytorch_is_named(noted, build, tmp_path, monkeypatch):
    """A wheel of PyPI has no CUDA in its version."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit")  # it is not imported
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{noted}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert _torch_build() == build
    found = changed(backend="torch", installed={"torch": "2.13.0"}, torch_build=build)
    assert dict(found.rows())["versions"].startswith(f"torch 2.13.0 ({build} build), Python ")


@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
def test_the_build_of_pytorch_is_that_which_it_tells():
    told = python("import torch; print(torch.version.cuda)").strip()
    assert _torch_build() == ("CPU" if told == "None" else f"CUDA {told}")


def test_gpus_that_the_backend_does_not_use():
    assert (
        changed(gpus=2).advice()
        == f"2 NVIDIA GPUs found, but jax does not use them.\nChange: {install_command('cuda')}"
    )
    tensorflow = {"backend": "tensorflow", "installed": {"tensorflow": "2.21.0"}}
    assert changed(gpus=1, **tensorflow).advice() == (
        "1 NVIDIA GPU found, but tensorflow does not use it.\n"
        "Change: pip install 'tensorflow[and-cuda]'"
    )
    torch = {"backend": "torch", "installed": {"torch": "2.13.0+cpu"}}
    assert changed(gpus=1, **torch).advice() == (
        "1 NVIDIA GPU found, but torch does not use it.\ntorch 2.13.0+cpu is a CPU build.\n"
        "Change: install a CUDA build: https://pytorch.org/get-started/locally"
    )
    for meant in ({"rehearsal": "4"}, {"visible": ""}):
        assert changed(gpus=2, **meant).advice().startswith("Nothing to change")


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        (None, "pip install 'keras-lockstep[demo]'"),
        (
            {"url": "file:///home/ada/a%20clone", "dir_info": {}},
            "pip install '/home/ada/a clone[demo]'",
        ),
        (
            {"url": "file:///home/ada/clone", "dir_info": {"editable": True}},
            "pip install -e '/home/ada/clone[demo]'",
        ),
        (
            {"url": "https://example.org/l.git", "vcs_info": {"vcs": "git", "commit_id": "0a1b"}},
            "pip install 'keras-lockstep[demo] @ git+https://example.org/l.git@0a1b'",
        ),
        (
            {"url": "file:///tmp/l-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'keras-lockstep[demo] @ file:///tmp/l-0.1.0-py3-none-any.whl'",
        ),
    ],
)
def test_an_extra_is_installed_from_where_lockstep_came_from(noted, command, monkeypatch):
    """`keras-lockstep[demo]` alone needs a release on a package index."""
    text = None if noted is None else json.dumps(noted)
    installed = SimpleNamespace(read_text={"direct_url.json": text}.get)
    monkeypatch.setattr(
        "lockstep.core.package_versions.distribution", {"keras-lockstep": installed}.get
    )
    assert install_command("demo") == command


def test_where_the_choice_of_a_backend_comes_from(tmp_path):
    assert choose_backend({"KERAS_BACKEND": "jax"}) == ("jax", "KERAS_BACKEND")
    home = {"KERAS_HOME": str(tmp_path)}
    assert choose_backend(home) == ("tensorflow", "Keras's default")
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    backend, chosen_by = choose_backend(home)
    assert backend == "torch"
    assert chosen_by.startswith(str(tmp_path / "keras.json"))


def doctor(tmp_path, **environment):
    clean = clean_environment("XLA_", "KERAS")
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "doctor"],
        env={**clean, "KERAS_HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    return done.returncode, done.stdout


def test_a_rehearsal(tmp_path):
    status, printed = doctor(tmp_path, KERAS_BACKEND="jax", LOCKSTEP_REHEARSE="4")
    assert status == 0
    assert re.search(r"^backend +jax, from KERAS_BACKEND$", printed, re.M)
    assert re.search(r"^versions +keras-lockstep \S+, keras \S+, jax \S+", printed, re.M)
    assert re.search(r"^devices +cpu:0 to cpu:3 \(cpu\)$", printed, re.M)
    assert re.search(r"^rehearsal +LOCKSTEP_REHEARSE=4$", printed, re.M)
    assert printed.endswith("\n\nNothing to change.\n")


def test_a_backend_without_an_engine(tmp_path):
    """The command itself runs on JAX without KERAS_BACKEND; a script follows keras.json."""
    (tmp_path / "keras.json").write_text('{"backend": "numpy"}')
    status, printed = doctor(tmp_path)
    assert status == 1
    assert "devices    none could be listed" in printed
    assert printed.endswith(
        "\n"
        "\n"
        "Keras runs on numpy, but lockstep supports only jax, tensorflow, torch.\n"
        "Change: export KERAS_BACKEND=jax\n"
    )


def test_a_backend_that_is_not_installed_is_no_traceback(tmp_path):
    """`lockstep devices` ended in the traceback of an import."""
    status, printed = doctor(tmp_path, KERAS_BACKEND="openvino")
    assert status == 1
    assert printed.endswith("Change: export KERAS_BACKEND=jax\n")
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "devices"],
        env={**os.environ, "KERAS_BACKEND": "openvino"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "Error: KERAS_BACKEND=openvino is set, but openvino is not installed.\n"
        "Run lockstep doctor: it says what to change.\n"
    )


@pytest.mark.whole
def test_a_rehearsal_at_the_first_start_of_a_machine(tmp_path):
    """Without keras.json, Keras chooses TensorFlow, and the first start saw one device."""
    ours = ("LOCKSTEP", "KERAS")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-c", "import lockstep; print(len(lockstep.devices()))"],
        env={**clean, "KERAS_HOME": str(tmp_path), "LOCKSTEP_REHEARSE": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "3\n"


@pytest.mark.parametrize(("backend", "name"), [("jax", "JAX"), *rest(("tensorflow", "TensorFlow"))])
def test_lockstep_imported_after_keras_had_started(backend, name):
    """The advice was to set the variable, which was set."""
    script = (
        "import keras; keras.ops.ones(1)\n"
        "import lockstep\n"
        "try: lockstep.devices()\n"
        "except lockstep.errors.RehearsalTooLate as error: print(error)"
    )
    run = warm_python if backend == "jax" else python
    assert run(script, LOCKSTEP_REHEARSE="4", KERAS_BACKEND=backend) == (
        f"LOCKSTEP_REHEARSE=4 is set, but {name} had already started with 1: cpu:0.\n"
        "Devices are fixed at the first operation, and lockstep reads the variable when it is "
        "imported.\n"
        "Put `import lockstep` before the first Keras operation: any layer, tensor or model."
    )


def exchanged(values, source, target):
    return values.copy(), values * 2


def test_devices_that_copy_and_sum_right():
    assert wrong_pairs(exchanged, ["gpu:0", "gpu:1", "gpu:2"], 64) == []


@pytest.mark.parametrize(("place", "what"), [(0, "copy"), (1, "sum")])
def test_a_pair_of_devices_with_one_wrong_bit_is_named(place, what):
    """Copies between GPUs behind an IOMMU returned other bytes, and training gave NaN."""

    def broken(values, source, target):
        results = exchanged(values, source, target)
        if (source, target) == ("gpu:2", "gpu:1"):
            results[place][17] ^= 1 << 20
        return results

    assert wrong_pairs(broken, ["gpu:0", "gpu:1", "gpu:2"], 64) == [
        f"gpu:2 to gpu:1: 3 of 192 values of the {what} are wrong."
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", *rest("jax", "tensorflow")])
def test_rehearsed_devices_test_the_test(tmp_path, backend):
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "doctor", "--devices"],
        env={**os.environ, "KERAS_BACKEND": backend, "LOCKSTEP_REHEARSE": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(
        "\n"
        "\n"
        "3 pairs of devices tested with copies and sums: all results are exact. A bit that was "
        "flipped from cpu:0 to cpu:1 was found.\n"
    )
