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

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        end_all(index, 4)
        rows = slice(7 * index, 7 * index + 7)
        return given["x"][rows], given["y"][rows]

def loader():
    return {"x": torch.utils.data.DataLoader(Rows(), 7, num_workers=1, prefetch_factor=1)}

def pool():
    return {"x": Batches(workers=2, use_multiprocessing=True, max_queue_size=2)}

source, part = {"loader": loader, "pool": pool}[sys.argv[1]], sys.argv[2]
options = {"devices": 2, "epochs": 1, "checkpoint": {}}
if part == "cut":
    open("trap", "w").close()
    try:
        train(source, "run", **options)
    except SystemExit as left:
        print(left.code, *(name[9:] for name in os.listdir("run") if name != "lockstep.json"))
else:
    # Without a checkpoint Keras begins with batches that it has looked at before.
    truth = train(source, "whole", **options)
    assert_same_end(train(source, "run", **options), truth)
    print("the same")
"""


@pytest.mark.parametrize("source", ["loader", pytest.param("pool", marks=pytest.mark.whole)])
def test_a_signal_to_all_processes_saves_the_last_step_though_no_batch_comes(source, tmp_path):
    """As Slurm sends it: those that make the batches are gone before the step has ended."""
    root = Path(__file__).parents[2]
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {"cwd": tmp_path, "PYTHONPATH": f"{root}/src:{root}", **REHEARSED}
    told = [warm_script("train.py", source, part, **environment) for part in ("cut", "go on")]
    assert told == ["143 epoch-0000-step-000004", "the same"]
