"""A training of the tests in double precision: alone by stock Keras, or in several processes.

python train.py --folder FOLDER [--alone] [--own-rows] [--pause SECONDS]
"""

import argparse
import os
import time
from pathlib import Path

import keras
import numpy as np

import lockstep
from lockstep.keras_compat import compute_in_float64

compute_in_float64()


class Progress(keras.callbacks.Callback):
    """Writes after each step how many steps each process has made, and its number on its host."""

    def __init__(self, folder, rank, pause):
        super().__init__()
        self._file = folder / f"progress-{rank}"
        self._pause = pause

    def on_train_batch_end(self, batch, logs=None):
        written = self._file.with_suffix(".new")
        written.write_text(f"{int(self.model.optimizer.iterations)} {os.getpid()}")
        written.replace(self._file)
        time.sleep(self._pause)


def build():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


class Batches(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self._batches = batches

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, number):
        return self._batches[number]


def own_batches(x, y, rank):
    """The batches of one of two processes: five of 6 rows, or six of 4, the last one of 3."""
    first, last, rows = ((0, 30, 6), (30, 53, 4))[rank]
    cuts = [slice(at, min(at + rows, last)) for at in range(first, last, rows)]
    return [(x[cut], y[cut]) for cut in cuts]


def joined(every):
    """The global batches: the rows of each process, in the order of the ranks."""
    steps = range(max(map(len, every)))
    parts = [[batches[step] for batches in every if step < len(batches)] for step in steps]
    return [tuple(map(np.concatenate, zip(*part, strict=True))) for part in parts]


def main(options):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(53, 6)), rng.normal(size=(53, 3))
    rank, callbacks = 0, []
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.alone:
        rank, size = lockstep.initialize()
        print(f"process {rank} of {size} on {os.uname().nodename}", flush=True)
        callbacks.append(lockstep.Checkpoint(options.folder / "checkpoints"))
        callbacks.append(Progress(options.folder, rank, options.pause))
    model = build()
    if not options.alone:
        lockstep.distribute(model)
    given = {"epochs": 3, "shuffle": False, "verbose": 2, "callbacks": callbacks}
    if not options.own_rows:
        model.fit(x, y, batch_size=10, **given)
    elif options.alone:
        model.fit(Batches(joined([own_batches(x, y, process) for process in (0, 1)])), **given)
    else:
        model.fit(lockstep.process_local(Batches(own_batches(x, y, rank))), **given)
    variables = [*model.variables, *model.optimizer.variables]
    values = [keras.ops.convert_to_numpy(each.value) for each in variables]
    np.savez(options.folder / f"values-{rank}.npz", *values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--alone", action="store_true", help="stock Keras on one device")
    parser.add_argument("--own-rows", action="store_true", help="each process has its rows")
    parser.add_argument("--pause", type=float, default=float(os.environ.get("PAUSE", 0)))
    main(parser.parse_args())
