"""What runs on pretended GPUs, and leaves what stock Keras leaves on one device, in float64.

python -m tests.pretended_gpus.programs numbers checkpoints

Each function is a program. With several processes, every process runs it.
"""

import os
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest

import lockstep
from lockstep.keras_compat import compute_in_float64
from tests.conformance.stock import every_loss_counted
from tests.conformance.zoo import ZOO
from tests.every_backend.on_a_gpu import (
    BOUND,
    ROWS,
    built,
    difference,
    left_by,
    left_by_keras,
)

KIND = "tpu" if os.environ.get("PRETENDED_TPUS") else "gpu"
SAMPLE = ("cnn", "masked_lstm", "added_losses")


def _stock(name, **options):
    case = ZOO[name]
    x, y = case.data(ROWS, np.random.default_rng(1))
    return x, y, built(case, "sgd", **options)


def _agrees(name, found, stock):
    apart = difference(found, stock)
    print(f"{name:28} {apart:.1e}", flush=True)
    assert apart <= BOUND, (name, apart)


def numbers(**options):
    """`fit`, `evaluate` and `predict` of a few models, replicated on all GPUs."""
    for name in SAMPLE:
        x, y, stock = _stock(name)
        right = left_by_keras(stock, x, y)
        model = lockstep.distribute(_stock(name)[-1], **options)
        assert all(each.startswith(f"{KIND}:") for each in model_devices(model)), model_devices(
            model
        )
        _agrees(name, left_by(model, x, y), right)
        x, y = (keras.tree.map_structure(lambda rows: rows[:5], each) for each in (x, y))
        with every_loss_counted():
            right = stock.train_on_batch(x, y)
        _agrees(f"{name}, train_on_batch", model.train_on_batch(x, y), right)


def model_devices(model):
    """The devices that a model is on."""
    from lockstep.attach.attachment import session_of

    return session_of(model).devices


def sharded():
    """The large weights in shards, gathered again in the backward pass."""

    def wide():
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        dense = [keras.layers.Dense(192, activation="tanh") for _ in range(3)]
        model = keras.Sequential([keras.Input((192,)), *dense, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    x, y = (np.random.default_rng(2).normal(size=(ROWS, size)) for size in (192, 1))
    right = left_by_keras(wide(), x, y)
    model = lockstep.distribute(wide(), state="sharded")
    found = left_by(model, x, y)
    _agrees("sharded", found, right)
    doubled = [2 * each for each in model.get_weights()]
    model.set_weights(doubled)
    _agrees("sharded, assigned", model.get_weights(), doubled)
    kernel = model.layers[0].kernel
    kernel.assign(keras.ops.convert_to_tensor(3 * doubled[0]))  # an array of this process
    _agrees("sharded, assigned an array", model.get_weights()[0], 3 * doubled[0])


def in_parts():
    """Micro-batches, on one GPU and on all."""
    for devices in (1, None):
        x, y, stock = _stock("masked_lstm")
        right = left_by_keras(stock, x, y)
        model = lockstep.distribute(_stock("masked_lstm")[-1], devices, micro_batch_size=2)
        _agrees(f"micro-batches on {devices or 'all'}", left_by(model, x, y), right)


def checkpoints():
    """A run that goes on with another number of GPUs."""
    case = ZOO["mlp"]
    x, y = case.data(ROWS, np.random.default_rng(1))
    right = left_by_keras(built(case, "adamw"), x, y)[-1]
    with tempfile.TemporaryDirectory() as folder:
        for epochs, devices in ((2, None), (3, 1)):
            model = lockstep.distribute(built(case, "adamw"), devices)
            given = {"batch_size": 6, "epochs": epochs, "verbose": 0}
            model.fit(x, y, **given, callbacks=[lockstep.Checkpoint(folder)])
        values = [np.array(keras.ops.convert_to_numpy(each.value)) for each in model.variables]
        _agrees("resumed on one", values, right)
        model.save(Path(folder) / "model.keras")
        loaded = keras.models.load_model(Path(folder) / "model.keras")
    _agrees("its file", model.predict(x, verbose=0), loaded.predict(x, verbose=0))


def checkpoints_in_processes():
    """All processes save one run, and go on from it."""
    folder = Path(os.environ["RUN"])
    case = ZOO["mlp"]
    x, y = case.data(ROWS, np.random.default_rng(1))
    right = left_by_keras(built(case, "adamw"), x, y)[-1]
    for epochs in (2, 3):
        model = lockstep.distribute(built(case, "adamw"))
        given = {"batch_size": 6, "epochs": epochs, "verbose": 0}
        model.fit(x, y, **given, callbacks=[lockstep.Checkpoint(folder, keep=1)])
    values = [np.array(keras.ops.convert_to_numpy(each.value)) for each in model.variables]
    _agrees("resumed in processes", values, right)
    lockstep.predict(model, x, folder / "rows.npy", batch_size=6)
    _agrees("rows in a file", np.load(folder / "rows.npy"), model.predict(x, verbose=0))


def branches():
    """Layers on two GPUs, with a checkpoint of both."""

    def two():
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        inputs = keras.Input((12,))
        sides = [keras.layers.Dense(8, "tanh", name=name)(inputs) for name in ("left", "right")]
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.add(sides)))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    x, y = ZOO["mlp"].data(ROWS, np.random.default_rng(1))
    right = left_by(two(), x, y)
    model = lockstep.place(two(), {"left": f"{KIND}:0", "right": f"{KIND}:1"})
    with tempfile.TemporaryDirectory() as folder:
        _agrees("branches", left_by(model, x, y, callbacks=[lockstep.Checkpoint(folder)]), right)


def predictions():
    """Rows in a file."""
    x, _, model = _stock("cnn")
    right = model.predict(x, batch_size=6, verbose=0)
    lockstep.distribute(model)
    with tempfile.TemporaryDirectory() as folder:
        lockstep.predict(model, x, Path(folder) / "rows.npy", batch_size=6)
        _agrees("rows in a file", np.load(Path(folder) / "rows.npy"), right)


def several_steps():
    """Two steps in one program."""
    case = ZOO["cnn"]
    x, y = case.data(ROWS, np.random.default_rng(1))
    right = left_by(built(case, "sgd", steps_per_execution=2), x, y)
    model = lockstep.distribute(built(case, "sgd", steps_per_execution=2))
    _agrees("several steps", left_by(model, x, y), right)


def profiled():
    """Where the time of a `fit` went, and on TPUs that none has been timed."""
    x, y, model = _stock("mlp")
    profile = lockstep.Profile(verbose=0)
    lockstep.distribute(model).fit(x, y, batch_size=6, verbose=0, callbacks=[profile])
    assert ("Profile has not been tested" in str(profile.report)) == (KIND == "tpu"), str(
        profile.report
    )


def refusals():
    """What a script does that takes these GPUs for others."""
    model = _stock("mlp")[-1]
    for devices in (f"{KIND}:9", "cpu:3", "gpu0", "qpu:1"):
        _refused(lambda named=devices: lockstep.distribute(model, named))
    _refused(lambda: lockstep.rehearse(7))
    if int(os.environ.get("LOCKSTEP_PROCESSES", "1")) > 1:
        _refused(lambda: lockstep.distribute(model, [0]))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if KIND == "gpu":
        _refused(lambda: lockstep.distribute(model))
    else:  # the variable says nothing of TPUs
        lockstep.release(lockstep.distribute(model))
    del os.environ["CUDA_VISIBLE_DEVICES"]
    os.environ["LOCKSTEP_REHEARSE"] = "2"
    _refused(lambda: lockstep.distribute(model))


def _refused(call):
    with pytest.raises(lockstep.errors.LockstepError) as caught:
        call()
    lines = str(caught.value).splitlines()
    print("refused:", lines[0])
    assert len(lines) <= 3


class _Noise(keras.utils.PyDataset):
    """Batches with NumPy's global random numbers."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x = np.random.normal(size=(6, 12))
        return x, x.sum(axis=1, keepdims=True)


class _Draws(keras.callbacks.Callback):
    """Draws from the same numbers after each step."""

    def on_train_batch_end(self, batch, logs=None):
        np.random.random()

    def get_state(self):
        return None

    def set_state(self, state):
        pass


class _Killed(BaseException):
    """Stands for the end of the process."""


class _Kill(_Draws):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.step:
            raise _Killed


def numpy_draws():
    """Data and a callback that draw from one stream, with and without a checkpoint."""

    def fit(model, *callbacks):
        np.random.seed(5)
        model.fit(_Noise(), epochs=3, shuffle=False, verbose=0, callbacks=[_Draws(), *callbacks])
        return model.get_weights()

    right = fit(_stock("mlp")[-1])
    _agrees("draws", fit(lockstep.distribute(_stock("mlp")[-1])), right)
    if "RUN" in os.environ:  # all processes save one run
        folder = Path(os.environ["RUN"]) / "draws"
        model = lockstep.distribute(_stock("mlp")[-1])
        _agrees("draws, saved", fit(model, lockstep.Checkpoint(folder)), right)
        return
    with tempfile.TemporaryDirectory() as folder:
        saved = lockstep.Checkpoint(Path(folder) / "saved", steps=2)
        _agrees("draws, saved", fit(lockstep.distribute(_stock("mlp")[-1]), saved), right)
        resumed = Path(folder) / "resumed"
        try:
            killed = lockstep.distribute(_stock("mlp")[-1])
            fit(killed, lockstep.Checkpoint(resumed, steps=2, background=False), _Kill(6))
        except _Killed:
            pass
        # Batches of the broken epoch are made again from the same numbers, without the callback's.
        model = lockstep.distribute(_stock("mlp")[-1])
        try:
            fit(model, lockstep.Checkpoint(resumed, steps=2))
        except lockstep.errors.CheckpointMismatch as refused:
            print("refused:", str(refused).splitlines()[0])
        else:
            _agrees("draws, resumed", model.get_weights(), right)


class _DrawsOnce(_Draws):
    """Draws after the second step of each epoch alone."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            np.random.random()


def resumed_draws():
    """A batch that was drawn ahead of a save is compared when it is drawn again."""

    def fit(model, *callbacks, **options):
        np.random.seed(5)
        given = {"epochs": 3, "shuffle": False, "verbose": 0, **options}
        model.fit(_Noise(), callbacks=[*callbacks], **given)
        return model.get_weights()

    def killed(folder, step, *callbacks, **options):
        saved = lockstep.Checkpoint(folder, steps=1, background=False)
        with pytest.raises(_Killed):
            fit(lockstep.distribute(_stock("mlp")[-1]), *callbacks, saved, _Kill(step), **options)

    with tempfile.TemporaryDirectory() as folder:
        # Saved after the third step of an epoch. The callback has drawn after the second one:
        # when the third batch was there, and before the fourth was drawn ahead.
        killed(Path(folder) / "callback", 8, _DrawsOnce())
        model = lockstep.distribute(_stock("mlp")[-1])
        with pytest.raises(lockstep.errors.CheckpointMismatch, match="has the checksum"):
            fit(model, _DrawsOnce(), lockstep.Checkpoint(Path(folder) / "callback", steps=1))
        # Each validation draws one batch ahead, on the CPU that goes on too.
        held_out = {"validation_data": _Noise(), "validation_steps": 2}
        right = fit(_stock("mlp")[-1], **held_out)
        killed(Path(folder) / "validation", 6, **held_out)
        model = lockstep.distribute(_stock("mlp")[-1], "cpu:0")
        saved = lockstep.Checkpoint(Path(folder) / "validation", steps=1)
        _agrees("draws of validation, resumed", fit(model, saved, **held_out), right)


if __name__ == "__main__":
    compute_in_float64()
    for program in sys.argv[1:]:
        globals()[program]()
