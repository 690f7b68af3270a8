"""Signals where processes of their own make the batches."""

from pathlib import Path

from tests.processes.common import python

REHEARSED = {"KERAS_BACKEND": "jax", "LOCKSTEP_REHEARSE": "2"}

FORKED = """
import multiprocessing, time
from lockstep.checkpoints.signals import Signals
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
    assert python(FORKED) == "-15 None"


LOADER = """
import os, signal, time, warnings
import torch
from tests.checkpoints.data import arrays
from tests.checkpoints.runs import assert_same_end, train

warnings.simplefilter("ignore")
trap = os.path.abspath("trap")

class Rows(torch.utils.data.Dataset):
    given = arrays()
    def __len__(self):
        return 42
    def __getitem__(self, index):
        if index == 30 and os.path.exists(trap):  # in the fifth batch
            os.unlink(trap)
            time.sleep(1)  # until the step before has ended
            os.kill(os.getppid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.given["x"][index], self.given["y"][index]

def source():
    loader = torch.utils.data.DataLoader(Rows(), 7, num_workers=1, prefetch_factor=1)
    return {"x": loader}

options = {"devices": 2, "epochs": 1}
truth = train(source, **options)
open(trap, "w").close()
try:
    train(source, "run", **options, checkpoint={})
except SystemExit as left:
    print(left.code, *(name[9:] for name in os.listdir("run") if name != "lockstep.json"))
assert_same_end(train(source, "run", **options, checkpoint={}), truth)
print("the same")
"""


def test_a_signal_to_all_processes_saves_the_last_step_though_no_batch_comes(tmp_path):
    """As Slurm sends it: the workers of a DataLoader are gone before the step has ended."""
    root = Path(__file__).parents[2]
    told = python(LOADER, cwd=tmp_path, PYTHONPATH=f"{root}/src:{root}", **REHEARSED)
    assert told.splitlines() == ["143 epoch-0000-step-000004", "the same"]
