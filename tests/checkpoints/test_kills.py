"""Runs that are killed with SIGKILL at random moments, and go on on other devices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints.kills import CASES
from tests.processes.common import clean_environment
from tests.tiers import further, rest

SOAK = Path(__file__).parents[2] / "benchmarks" / "checkpoint_soak.py"


@pytest.mark.parametrize(
    "cases",
    [
        *further(["everything", "zoo, several_inputs_and_outputs"]),
        *rest(*([name] for name in CASES)),
    ],
)
def test_a_killed_run_ends_as_one_that_was_not(cases):
    clean = clean_environment()
    done = subprocess.run(
        [sys.executable, str(SOAK), "--kills", str(3 * len(cases)), "--cases", *cases],
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] >= 3 * len(cases)
    assert found["wrong"] == []
