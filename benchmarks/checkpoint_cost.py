"""`python benchmarks/checkpoint_cost.py`: what saving costs, beside Keras's own ways.

A model of 100 M parameters with SGD and momentum, on one CPU device. In each round, every way
saves once, in an order of chance, and so does a raw sequential write and fsync of as many bytes
as the parameters and slots have; ratios are to the raw write of the same round. *Blocked* is
how long the callback keeps the caller; *durable* is until fsync has returned for the last byte
(of ways that do not sync, their files are synced here, after their own time). At the end of a
round one step is timed while lockstep's thread writes, against one that nothing goes on beside.
At last, processes of their own train three epochs each, with a callback or without, and tell the
most memory that they had.
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3"}

import keras
import numpy as np

import lockstep
from lockstep.attach.attachment import attachment_of
from lockstep.checkpoint.callback import Checkpoint
from lockstep.checkpoint.checkpoint_run import CheckpointRun
from lockstep.checkpoint.fit_run import FitRun
from lockstep.core.engine import TRAIN
from lockstep.training.callbacks import Callbacks


def model(width, depth):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
    made = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(1)])
    lockstep.distribute(made, devices=1)
    made.compile(keras.optimizers.SGD(1e-4, momentum=0.9), "mse")
    return made


def sync(path):
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def size(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


class Ways:
    """Each way saves once, into a folder, and tells when it let go and when the disk had it."""

    def __init__(self, made, batch):
        self.made, self.batch = made, batch
        self.bytes = sum(
            int(np.prod(v.shape)) * 4 for v in [*made.variables, *made.optimizer.variables]
        )
        self.block = os.urandom(8 * 2**20)

    def raw(self, folder):
        handle = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT)
        left = self.bytes
        while left > 0:
            left -= os.write(handle, self.block[: min(left, len(self.block))])
        os.fsync(handle)
        os.close(handle)

    def lockstep(self, folder):
        """What the callback does at the end of an epoch; the thread is waited for afterwards."""
        checkpoint = Checkpoint(folder, keep=1)
        x, y = self.batch
        session = attachment_of(self.made).session
        batches = session.batches(TRAIN, recorded=True, x=x, y=y, batch_size=len(x), shuffle=True)
        callbacks = Callbacks([checkpoint], add_history=True, model=self.made)
        others = callbacks.callbacks[:-1]  # the checkpoint is the last one
        observed = FitRun(session, batches, None, others, 10)
        run = CheckpointRun(checkpoint._settings, ())
        run.begin(observed, 0)
        began = time.perf_counter()
        run.epoch_ended(1, {"loss": 1.0})
        blocked = time.perf_counter() - began
        return blocked, run._background.finish

    def keras_callback(self, callback):
        callback.set_model(self.made)
        callback.on_train_begin()
        callback.on_epoch_begin(0)
        began = time.perf_counter()
        callback.on_epoch_end(0, {"loss": 1.0})
        return time.perf_counter() - began

    def weights_h5(self, folder):
        callback = keras.callbacks.ModelCheckpoint(
            folder / "a.weights.h5", "loss", mode="min", save_weights_only=True
        )
        return self.keras_callback(callback), lambda: sync(folder)

    def keras_file(self, folder):
        callback = keras.callbacks.ModelCheckpoint(folder / "a.keras", "loss", mode="min")
        return self.keras_callback(callback), lambda: sync(folder)

    def backup(self, folder):
        callback = keras.callbacks.BackupAndRestore(folder)
        return self.keras_callback(callback), lambda: sync(folder)

    def orbax(self, folder):
        callback = keras.callbacks.OrbaxCheckpoint(folder / "orbax", save_freq="epoch")
        blocked = self.keras_callback(callback)
        return blocked, callback.wait_until_finished


CALLBACKS = {
    "lockstep": lambda folder: Checkpoint(folder, keep=1),
    "weights_h5": lambda folder: keras.callbacks.ModelCheckpoint(
        folder / "a.weights.h5", save_weights_only=True
    ),
    "orbax": lambda folder: keras.callbacks.OrbaxCheckpoint(folder / "orbax", save_freq="epoch"),
}


def memory_of(name, made, batch, folder):
    """The most memory, in bytes, that this process had once it has trained three epochs."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    callbacks = [CALLBACKS[name](folder)] if name in CALLBACKS else []
    x, y = (np.concatenate([each, each]) for each in batch)
    made.fit(x, y, batch_size=len(batch[0]), epochs=3, verbose=0, callbacks=callbacks)
    shutil.rmtree(folder)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_in_a_process(name, arguments):
    command = [sys.executable, __file__, "--memory-of", name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=2880)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--memory-of", choices=["nothing", *CALLBACKS])
    options = parser.parse_args()
    made = model(options.width, options.depth)
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(8, options.width)).astype("float32"), np.zeros((8, 1), "float32")
    if options.memory_of:
        print(memory_of(options.memory_of, made, batch, options.folder))
        return
    made.train_on_batch(*batch)
    # Stock saving, not lockstep's whole files, is what the others do.
    for name in ("save", "save_weights"):
        del vars(made)[name]
    ways = Ways(made, batch)
    names = ["lockstep", "weights_h5", "keras_file", "backup", "orbax"]
    found = {name: {"blocked": [], "durable": [], "step": [], "bytes": []} for name in names}
    raws, steps, loads = [], [], []
    chance = random.Random(0)
    for number in range(-1, options.rounds):  # the first round compiles, and is not counted
        loads.append(os.getloadavg()[0])
        each = {}
        for name in chance.sample(["raw", *names], len(names) + 1):
            folder = Path(tempfile.mkdtemp(dir=options.folder))
            os.sync()
            began = time.perf_counter()
            if name == "raw":
                ways.raw(folder)
                raw = time.perf_counter() - began
            else:
                blocked, finish = getattr(ways, name)(folder)
                finish()
                durable = time.perf_counter() - began
                each[name] = (blocked, durable, size(folder))
            shutil.rmtree(folder)
        usual = step(made, batch)
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        _, finish = ways.lockstep(folder)
        after = step(made, batch)
        finish()
        shutil.rmtree(folder)
        if number < 0:
            continue
        raws.append(raw)
        steps.append((after - usual) / raw)
        for name, (blocked, durable, written) in each.items():
            found[name]["blocked"].append(blocked / raw)
            found[name]["durable"].append(durable / raw)
            found[name]["bytes"].append(written / ways.bytes)
    print(f"{ways.bytes / 1e6:.0f} MB of variables and slots; {options.rounds} rounds;", end=" ")
    print(f"raw {spread(raws)} s; load {min(loads):.1f} to {max(loads):.1f}")
    for name in names:
        words = [f"{key} {spread(found[name][key])}" for key in ("blocked", "durable", "bytes")]
        print(f"{name:12}", *words, sep="  ")
    print("lockstep: the next step is longer by", spread(steps), "of raw, while a thread writes")
    h5 = found["weights_h5"]["blocked"]
    over = [mine / theirs for mine, theirs in zip(found["lockstep"]["blocked"], h5, strict=True)]
    print("lockstep blocked, over .weights.h5 blocked:", spread(over))
    arguments = ["--width", str(options.width), "--depth", str(options.depth)]
    arguments += ["--folder", str(options.folder)]
    memory = {name: memory_in_a_process(name, arguments) for name in ("nothing", *CALLBACKS)}
    for name in CALLBACKS:
        more = (memory[name] - memory["nothing"]) / ways.bytes
        print(f"{name}: at most {more:.2f} of the state more memory than without")
    print(json.dumps({"raw": raws, "step": steps, **found}))


def step(made, batch):
    began = time.perf_counter()
    made.train_on_batch(*batch)
    return time.perf_counter() - began


def spread(values):
    low, high = min(values), max(values)
    return f"{statistics.median(values):.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
