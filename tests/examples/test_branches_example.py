"""The old recipe of a shared LSTM on two devices."""

import re

import pytest

from tests.examples.common import FOLDER
from tests.processes.common import script, warm_script
from tests.tiers import rest


@pytest.mark.parametrize("backend", ["jax", *rest("tensorflow", "torch")])
def test_the_branches_train_and_the_file_is_plain(tmp_path, backend):
    run = warm_script if backend == "jax" else script
    printed = run(
        FOLDER / "shared_lstm_branches.py",
        *("--samples", "24", "--length", "6", "--units", "4", "--epochs", "2", "--batch", "10"),
        *("--file", str(tmp_path / "branches.keras")),
        KERAS_BACKEND=backend,
        LOCKSTEP_REHEARSE="3",
    )
    assert f"lockstep: {backend}, layers on cpu:0 to cpu:2" in printed
    assert "from cpu:1" in printed  # the table of placement
    (difference,) = re.findall(r"largest difference (\S+)", printed)
    assert float(difference) <= 1e-6
    assert (tmp_path / "branches.keras").is_file()
