"""The stateful LSTM: a long sequence fed in windows is the sequence fed whole."""

import re

import pytest

from tests.examples.common import run_example


@pytest.mark.whole
def test_the_state_is_carried_from_window_to_window(tmp_path):
    printed = run_example(
        "stateful_lstm.py",
        4,
        "--sequences 6 --windows 5 --window 4 --units 8 --epochs 2 --file {folder}/stateful.keras",
        tmp_path,
    )
    (difference,) = re.findall(r"in windows and whole: largest difference (\S+)", printed)
    assert float(difference) <= 1e-5
