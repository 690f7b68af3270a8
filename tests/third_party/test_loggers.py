"""A run of a logger is one run, under two processes that train one model."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

WANDB = """
import wandb
from wandb.integration.keras import WandbMetricsLogger

if lockstep.is_first():
    wandb.init(project="digits", dir=sys.argv[1], mode="offline")
callbacks = [lockstep.first_process(WandbMetricsLogger)]
"""
MLFLOW = """
import mlflow
from mlflow.keras import MlflowCallback

mlflow.set_tracking_uri(f"sqlite:///{sys.argv[1]}/mlflow.db")
if lockstep.is_first():
    mlflow.start_run()
callbacks = [MlflowCallback()]
"""
TRAIN = """
import sys
import keras, lockstep
import numpy as np

rank, size = lockstep.initialize()
assert size == 2
{logger}
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
lockstep.distribute(model)
model.compile("sgd", "mse")
x = np.ones((10, 6))
model.fit(x, x[:, :2], epochs=2, verbose=0, callbacks=callbacks)
{end}
"""
ENDS = {"wandb": "if rank == 0: wandb.finish()", "mlflow": "if rank == 0: mlflow.end_run()"}


@pytest.mark.parametrize(("name", "logger"), [("wandb", WANDB), ("mlflow", MLFLOW)])
def test_two_processes_make_one_run(name, logger, tmp_path):
    pytest.importorskip(name)
    (tmp_path / "train.py").write_text(TRAIN.format(logger=logger, end=ENDS[name]))
    runs = tmp_path / "runs"
    runs.mkdir()
    subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "--processes", "2", "train.py", str(runs)],
        cwd=tmp_path,
        env={**os.environ, "LOCKSTEP_REHEARSE": "1", "WANDB_SILENT": "true"},
        check=True,
    )
    assert _runs(name, runs) == 1


def _runs(name: str, folder: Path) -> int:
    if name == "wandb":
        return len([each for each in (folder / "wandb").iterdir() if "offline-run-" in each.name])
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        runs = database.execute("select run_uuid from runs").fetchall()
        logged = database.execute("select run_uuid from metrics where key = 'loss'").fetchall()
    assert set(logged) == set(runs)
    return len(runs)
