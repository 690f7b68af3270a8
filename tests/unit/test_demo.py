"""The demo, as it is run from a folder of the user's."""

import os
import re
import subprocess
import sys

import keras
import pytest

from lockstep.errors import UnsupportedBackend
from lockstep.tools.demo import run_demo


@pytest.mark.whole
def test_the_demo_in_a_folder_with_files_of_the_users(tmp_path):
    """It removed two of them; XLA's own CPU devices, and a console without Unicode, ended it."""
    for name in ("held_out.npz", "one-device.keras"):
        (tmp_path / name).write_text("the user's")
    command = [sys.executable, "-m", "lockstep", "demo", "--epochs", "1", "--devices", "2"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP", "JAX_NUM"))}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [*command, "--output", "."],
        cwd=tmp_path,
        env={**clean, "XLA_FLAGS": flags, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.sub(r"\s+", " ", done.stdout)
    assert (
        "2 devices gave the same results as one device: the losses of all 58 training steps"
        in found
    )
    assert re.search(r"Python on one device \.\.\., about \d+ s left", done.stderr)
    files = {file.name for file in tmp_path.iterdir()}
    written = {"digits.keras", "python.keras", "demo.png"}
    assert files == {"held_out.npz", "one-device.keras", *written}
    for row in ("Digits: held-out accuracy", "Python: held-out loss"):
        assert row in done.stdout
    assert "on 2 devices 27 + 26, and 16 rows in the last batch" in done.stdout
    assert "Epoch 1" not in done.stdout, "one display, and no bar of Keras"
    for name in ("held_out.npz", "one-device.keras"):
        assert (tmp_path / name).read_text() == "the user's"


def test_the_demo_on_another_backend_is_refused_before_it_trains(tmp_path, monkeypatch):
    """Dropout draws other numbers there: the runs were said to differ, to be reported."""
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    with pytest.raises(UnsupportedBackend, match="KERAS_BACKEND=jax lockstep demo"):
        run_demo(2, 1, tmp_path)
