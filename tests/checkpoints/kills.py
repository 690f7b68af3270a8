"""`python -m tests.checkpoints.kills`: runs that are killed with SIGKILL at random moments.

A warm process that has imported everything and started nothing forks one child for each
attempt. A child trains from scratch, or goes on from its folder, on a number of devices that
may be another each time (in one run of three it is the same), and is killed after a random
number of batches and a random time, until one comes to the end, which is compared with a run
that has no checkpoint and was not killed. The conformance zoo's models get a kind of data by
chance.
"""

import argparse
import importlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

CASES = {
    # name: (model, data, devices to choose from)
    "arrays, any devices": ("smooth", "with_validation", [1, 2, 4, 8]),
    "everything": ("everything", "with_validation", [4]),
    "stopping": ("stopping", "with_validation", [2]),
    "stateful RNN": ("recurrent", "sequences", [1, 2, 4]),
    "loss scale": ("accumulating", "arrays", [3]),
    "shuffled by batch": ("small", "arrays_by_batch", [4]),
    "passes that wrap": ("small", "arrays_that_wrap", [1, 8]),
    "PyDataset": ("small", "py_dataset", [2, 4]),
    "PyDataset, workers": ("small", "py_dataset_with_workers", [2]),
    "PyDataset with a state": ("small", "py_dataset_with_state", [4]),
    "tf.data": ("small", "tf_data", [4]),
    "tf.data, repeated": ("small", "tf_data_repeated", [2, 3]),
    "torch": ("small", "torch_loader", [4]),
    "Grain": ("small", "grain_dataset", [1, 2]),
    "generator": ("small", "generator", [4]),
}
EPOCHS = 10
ZOO = {
    "mlp": [1, 2, 3, 4, 8],
    "cnn": [2, 4],
    "bias_before_norm": [1, 4],
    "several_inputs_and_outputs": [1, 3, 8],
    "shared_layer": [2, 4, 8],
    "nested_model": [1, 2, 3],
    "subclassed": [1, 2, 3, 4, 8],
    "masked_lstm": [1, 2, 4],
    "attention": [2, 3, 4],
    "added_losses": [1, 2, 8],
}
CASES |= {f"zoo, {name}": (name, None, devices) for name, devices in ZOO.items()}
BATCHES = 5  # after which a child is killed, at most
SECONDS = 0.1  # and the time then, which may be that of validation, or of the end of an epoch


def main():
    """Kill runs until enough kills have been survived; print what was found as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    chance = random.Random(options.seed)
    for module in ("tests.checkpoints.test_state", "tests.checkpoints.zoo"):
        importlib.import_module(module)
    for kind, library in (("tf.data", "tensorflow"), ("torch", "torch"), ("Grain", "grain")):
        if any(kind in name or "zoo" in name for name in options.cases):
            importlib.import_module(library)
    found, began = [], time.monotonic()
    for name in itertools.cycle(options.cases):
        if len(found) >= len(options.cases) and _kills(found) >= options.kills:
            break  # every case once, and then as many more as it takes
        found.append(_killed_run(name, -(-options.kills // len(options.cases)), chance))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(
        json.dumps(
            {
                "kills": _kills(found),
                "while saving": sum(each["while saving"] for each in found),
                "runs": len(found),
                "bit for bit": sum(each["apart"] == 0 for each in found),
                "apart": max(each["apart"] for each in found),
                "wrong": [each for each in found if not each["apart"] <= each["allowed"]],
                "minutes": round((time.monotonic() - began) / 60, 1),
            }
        )
    )


def _kills(found):
    return sum(each["kills"] for each in found)


def _killed_run(name, kills, chance):
    _, kind, devices = CASES[name]
    if kind is None:
        kind = chance.choice(list(importlib.import_module("tests.checkpoints.zoo").KINDS))
    if chance.random() < 1 / 3:
        devices = [chance.choice(devices)]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        _attempt(name, kind, base, devices[0], truth=True)
        survived, saving, used = 0, 0, set()
        while survived < kills:
            used.add(count := chance.choice(devices))
            when = chance.randint(1, BATCHES), chance.uniform(0, SECONDS)
            if not _attempt(name, kind, base, count, kill_after=when):
                survived += 1
                saving += any(path.name[0] == "." for path in (base / "run").iterdir())
            else:  # it came to its end before: that is a run, too
                break
        used.add(count := chance.choice(devices))
        _attempt(name, kind, base, count)
        apart = _apart(base / "truth.npz", base / "end.npz")
    allowed = 0.0 if used == {devices[0]} else 1e-5
    return {
        "case": name,
        "data": kind,
        "kills": survived,
        "while saving": saving,
        "devices": sorted(used),
        "apart": apart,
        "allowed": allowed,
    }


def _attempt(name, kind, base, devices, truth=False, kill_after=None):
    """A child that trains; whether it came to its end, and was not killed before."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            _train(name, kind, base, devices, truth, writing)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        if kill_after is not None:
            batches, seconds = kill_after
            if all(pipe.read(1) for _ in range(batches)):
                time.sleep(seconds)
                os.kill(child, signal.SIGKILL)
        pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert status == 0, f"{name} did not come to its end"
    return True


def _train(name, kind, base, devices, truth, pipe):
    import keras
    import numpy as np

    import lockstep
    from tests.checkpoints import data, runs, test_state, zoo
    from tests.conformance.side_by_side import smooth

    lockstep.rehearse(devices=devices)
    warnings.simplefilter("ignore")
    model, _, _ = CASES[name]
    if model in ZOO:
        training = zoo.training(model, kind)
    else:
        makes = {"smooth": smooth, "small": runs.small, "stopping": runs.small}
        training = {
            "epochs": EPOCHS,
            "make": makes.get(model) or getattr(test_state, model),
            "source": getattr(data, kind, None) or getattr(test_state, kind),
        }

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            os.write(pipe, b".")
            time.sleep(0.01)

    callbacks = [Slow]
    if model == "stopping":
        callbacks += [
            lambda: keras.callbacks.EarlyStopping(
                "val_loss", min_delta=9.0, patience=7, restore_best_weights=True
            ),
            lambda: keras.callbacks.ReduceLROnPlateau(
                "val_loss", 0.5, patience=2, mode="min", min_delta=9.0
            ),
        ]
    folder = None if truth and "workers" not in name else base / ("aside" if truth else "run")
    history, variables = runs.train(
        **training,
        folder=folder,
        devices=devices,
        callbacks=callbacks,
        checkpoint={"steps": 1},
    )
    values = {f"v{n}": value for n, value in enumerate(variables.values())}
    values |= {f"history/{each}": np.array(numbers) for each, numbers in history.items()}
    np.savez(base / ("truth.npz" if truth else "end.npz"), **values)


def _apart(truth, end):
    import numpy as np

    with np.load(truth) as one, np.load(end) as other:
        assert sorted(one.files) == sorted(other.files)
        for name in one.files:
            assert one[name].shape == other[name].shape, name
        gaps = [np.abs(one[n].astype("float64") - other[n].astype("float64")) for n in one.files]
    return float(max(np.max(gap, initial=0.0) for gap in gaps))


if __name__ == "__main__":
    main()
