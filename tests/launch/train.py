"""A training of the tests: the model is built before it is distributed, as in most scripts.

python train.py FOLDER [FAULT RANK]
"""

import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

ROWS = {"batch_size": 10, "epochs": 3}


def build():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(53, 6)).astype("float32"), rng.normal(size=(53, 3)).astype("float32")


class Fault(keras.callbacks.Callback):
    """What one process meets after the second step of the second epoch, the first time."""

    def __init__(self, fault, folder):
        super().__init__()
        self.fault = fault
        self.folder = folder
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) != (1, 2) or (self.folder / "failed").exists():
            return
        (self.folder / "failed").touch()
        if self.fault == "raises":
            raise OSError("the disk is full")
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "stopped":
            time.sleep(1.5)  # the launcher has the last status
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault.startswith("told to leave"):
            os.kill(os.getpid(), signal.SIGTERM)
        if self.fault == "told to leave, then raises":
            raise OSError("the disk is full")
        if self.fault == "assigns":
            self.model.layers[0].kernel.assign(self.model.layers[0].kernel + 1.0)


def main(folder, fault=None, at=0):
    import lockstep

    model = build()
    lockstep.distribute(model)
    rank, _ = lockstep.initialize()
    callbacks = [lockstep.Checkpoint(folder / "checkpoints", steps=1)]
    if fault and rank == int(at):
        callbacks.append(Fault(fault, folder))
    x, y = data()
    model.fit(x, y, **ROWS, verbose=2, callbacks=callbacks)
    model.save(folder / "model.keras")
    print("trained by process", rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
