"""Signals where processes of their own make the batches."""

from pathlib import Path

import pytest

from tests.processes.common import python, warm_script

REHEARSED = {"KERAS_BACKEND": "jax", "LOCKSTEP_REHEARSE": "2"}

FORKED = """
import multiprocessing, time
from lockstep.checkpoint.signals import Signals
fork = multiprocessing.get_context("fork")
begun = fork.Event()
def work():
    begun.set()
    time.sleep(60)
with Signals() as signals:
    worker = fork.Process(target=work)
    worker.start()
    begun.wait(10)
    worker.terminate()  # by SIGTERM, as the pools of Keras's workers do
    worker.join(10)
    print(worker.exitcode, signals.asked)
    worker.kill()
"""


def test_a_forked_worker_is_ended_by_the_signal_that_a_fit_puts_off():
    assert python(FORKED) == "143 None"


SCRIPT = """
import os, signal, sys, time, warnings
import keras, torch
import lockstep
from tests.checkpoints.data import arrays
from tests.checkpoints.runs import assert_same_end, train

warnings.simplefilter("ignore")
given = arrays()

def end_all(index, at):
    if index == at and os.path.exists("trap"):
        os.unlink("trap")
        time.sleep(1)  # until the step before has ended
        os.kill(os.getppid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 42
    def __getitem__(self, index):
        end_all(index, 30)  # in the fifth batch
        return given["x"][index], given["y"][index]

def loader():
    return {"x": torch.utils.data.DataLoader(Rows(), 7, num_workers=1, prefetch_factor=1)}

part = sys.argv[1]
options = {"devices": 2, "epochs": 1, "checkpoint": {}}
if part == "cut":
    open("trap", "w").close()
    try:
        train(loader, "run", **options)
    except SystemExit as left:
        print(left.code, os.listdir("run"))
else:
    truth = train(loader, "whole", **options)
    assert_same_end(train(loader, "run", **options), truth)
    print("the same")
"""


@pytest.mark.whole
def test_a_signal_that_ends_the_workers_too_leaves_fit_as_the_signal_asks(tmp_path):
    """As Slurm sends it: those that make the batches are gone before the step has ended."""
    root = Path(__file__).parents[2]
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {"cwd": tmp_path, "PYTHONPATH": f"{root}/src:{root}", **REHEARSED}
    told = [warm_script("train.py", part, **environment) for part in ("cut", "go on")]
    assert told == ["143 ['lockstep.json']", "the same"]
