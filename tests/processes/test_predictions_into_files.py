"""`lockstep.predict` into a file: killed, and in two processes."""

import numpy as np
import pytest

import lockstep
from tests.conformance.common import assert_same, compile_, data, model
from tests.processes.common import warm_end
from tests.processes.test_several import run_both

KILLED = """
import os, signal, sys
import lockstep
from tests.conformance.common import data, model

def batches():
    for number, first in enumerate(range(0, 40, 4)):
        if number == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        yield (data(40)[0][first : first + 4],)

made = lockstep.distribute(model(), 4)
lockstep.predict(made, batches(), sys.argv[1], verbose=0)
"""


@pytest.mark.thorough
def test_a_killed_call_goes_on_from_the_position_that_the_disk_has(tmp_path):
    path = tmp_path / "scores.npy"
    code, _, error = warm_end(["-c", KILLED, path], LOCKSTEP_REHEARSE="4")
    assert code == -9, error
    assert not path.exists()
    assert (tmp_path / "scores.npy.partial/position.json").exists()
    made, (x, _) = model(), data(40)
    wanted = made.predict(x, verbose=0)
    lockstep.distribute(made, 2)
    lockstep.predict(made, x, path, batch_size=4, verbose=0)
    assert_same(np.load(path), wanted)
    assert [each.name for each in tmp_path.iterdir()] == ["scores.npy"]


SEVERAL = """
made = lockstep.distribute(model(compiled=False))
x = data(41)[0]
errors, rows = [], []

def batches(end):
    for number, first in enumerate(range(0, 41, 4)):
        if number == end:
            raise ZeroDivisionError
        yield (x[first : first + 4],)

try:
    lockstep.predict(made, batches(5), "scores.npy", verbose=0)
except ZeroDivisionError as error:
    errors.append("ended")
lockstep.predict(made, x, "scores.npy", batch_size=4, verbose=2)
first = np.load("scores.npy").tolist()
try:
    lockstep.predict(made, x if rank else x[::-1], "scores.npy", batch_size=4, verbose=0)
except LockstepError as error:
    errors.append(type(error).__name__)
lockstep.predict(made, x, lambda each: rows.append(len(each)), batch_size=16, verbose=0)
compile_(made)
report(made, {}, first=first, errors=errors, rows=rows)
"""


@pytest.mark.thorough
def test_the_first_of_two_processes_writes_the_rows_of_one(tmp_path):
    (first, second), said = run_both(SEVERAL, tmp_path)
    one = model(compiled=False)
    compile_(one)
    assert_same(np.array(first["first"]), one.predict(data(41)[0], verbose=0))
    assert first["first"] == second["first"]
    assert first["errors"] == second["errors"] == ["ended", "ProcessesDisagree"]
    assert (first["rows"], second["rows"]) == ([16, 16, 9], [])
    assert "scores.npy continues after 16 rows" in said[0]
    assert "continues after" not in said[1]
