"""Sharded state in each of several processes on PyTorch, against one device in the same process.

python torch_sharded.py FOLDER CASE...
"""

import copy
import functools
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import keras
import numpy as np
import torch

import lockstep
import tests.torch.double  # noqa: F401  (double precision)
from lockstep.engines.torch.sharded.sharded_variables import ShardedVariable
from lockstep.errors import LockstepError
from lockstep.keras_compat import stored_value
from lockstep.processes.coordination import patience
from tests.agreement import assert_equal, seeded, values
from tests.every_backend import sharded_models
from tests.every_backend.sharded_models import SAMPLE, assert_trained_alike, compiled, data, later

sys.modules["lockstep.core.devices"].SHARDED_FROM = 0
RANK, SIZE = lockstep.initialize()
FOLDER = Path(sys.argv[1])
QUIET = {"verbose": 0, "shuffle": False}


def pair(build, **options):
    """A model for Keras alone, and one in parts whose weights are those of process 0."""
    one, many = seeded(build), seeded(build, 11 + RANK)
    return one, lockstep.distribute(many, state="sharded", **options)


mlp = functools.partial(compiled, metrics=["mae"])
fit = functools.partial(sharded_models.fit, batch_size=7, epochs=2)  # the last batch has 3 rows


def held(model):
    """The elements that this process has."""
    return sharded_models.held(model.trainable_variables)[0]


def training(cases):
    for name, optimizer in cases:
        one, many = pair(functools.partial(compiled, name, optimizer))
        assert_trained_alike(one, many, name, validation_split=0.2)
        assert held(many) <= held(one) / SIZE + len(many.variables) or name == "recurrent"


def a_sample():
    training(SAMPLE[::9])


def every_model_and_optimizer():
    training(SAMPLE)


def calls_between_steps():
    one, many = pair(mlp)
    x, y = data()
    assert {type(variable) for variable in many.trainable_variables} == {ShardedVariable}
    for rows in (1, 2, 9):  # fewer rows than processes
        assert_equal(*[model.train_on_batch(x[:rows], y[:rows]) for model in (one, many)])
        assert_equal(*[model.test_on_batch(x[:rows], y[:rows]) for model in (one, many)])
        assert_equal(*[model.predict_on_batch(x[:rows]) for model in (one, many)])
    assert_equal(*[model(x[:3]).detach() for model in (one, many)])
    assert_equal(fit(one), fit(many))
    here = held(many)
    many.set_weights([weight + 1 + RANK for weight in many.get_weights()])  # those of process 0
    one.set_weights([weight + 1 for weight in one.get_weights()])
    many.layers[1].kernel.assign(many.layers[1].kernel * 0.5)
    one.layers[1].kernel.assign(one.layers[1].kernel * 0.5)
    assert_equal(fit(one), fit(many))
    assert_equal(one, many)
    assert held(many) == here
    copied = keras.models.clone_model(many)
    copied.set_weights(many.get_weights())
    for each in (copied, copy.deepcopy(many)):
        assert {type(variable) for variable in each.variables} == {keras.Variable}
        assert_equal(each.predict(x, verbose=0), one.predict(x, verbose=0))


def built_and_compiled_later():
    one, many = pair(later)
    assert_equal(fit(one), fit(many))
    assert type(many.layers[0].kernel) is ShardedVariable
    (before,) = [slot for slot in many.optimizer.variables if "bias_momentum" in slot.path][:1]
    for model in (one, many):
        model.layers[1].trainable = False
        model.compile(keras.optimizers.Adam(0.01), "mae")
        model.train_on_batch(*data(rows=8))
        fit(model)
    assert_equal(one, many)
    assert "belonged to 'sequential" in words(before.numpy)
    lockstep.release(many)
    assert {type(variable) for variable in many.variables} == {keras.Variable}
    assert_equal(fit(one), fit(many))
    for state in ("replicated", "sharded"):
        lockstep.distribute(many, state=state)
        assert_equal(fit(one), fit(many))
    assert_equal(one, many)


class Halves(keras.callbacks.Callback):
    """Reads and assigns between two steps, in every process."""

    def on_train_batch_end(self, batch, logs=None):
        kernel = self.model.layers[0].kernel
        kernel.assign(kernel.numpy() * 0.5)


def callbacks():
    made = keras.callbacks
    for names, optimizer in (
        (lambda folder: [Halves()], "LAMB"),
        (lambda folder: [made.EarlyStopping("loss", patience=0, restore_best_weights=True)], "SGD"),
        (lambda folder: [made.ReduceLROnPlateau("loss", patience=0, min_delta=9.0)], "AdamW"),
        (lambda folder: [made.SwapEMAWeights(swap_on_epoch=True)], "average"),
        (lambda folder: [made.ModelCheckpoint(folder / "b.keras", "loss", save_best_only=True)],
         "Muon"),
        (lambda folder: [made.ModelCheckpoint(folder / "{epoch}.weights.h5", save_freq=3,
                                              save_weights_only=True)], "global norm"),
    ):  # fmt: skip
        models = pair(functools.partial(compiled, "mlp", optimizer))
        folders = [FOLDER / f"{optimizer} {name}" for name in (f"one {RANK}", "many")]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        histories = [
            fit(model, epochs=5, validation_split=0.3, callbacks=names(folder))
            for model, folder in zip(models, folders, strict=True)
        ]
        assert_equal(*histories)
        assert_equal(*models)
        for file in sorted(folders[0].iterdir()):
            one, many = (copy.deepcopy(models[0]) for _ in folders)
            one.load_weights(file)
            many.load_weights(folders[1] / file.name)
            assert_equal(one.get_weights(), many.get_weights())


def files():
    one, many = pair(mlp)
    fit(one)
    fit(many)
    many.save(FOLDER / f"{RANK}.keras")
    many.save_weights(FOLDER / f"{RANK}.weights.h5")
    assert sorted(file.name for file in FOLDER.glob("[0-9].*")) == ["0.keras", "0.weights.h5"]
    loaded = keras.models.load_model(FOLDER / "0.keras")
    assert_equal(loaded, one)
    lockstep.distribute(loaded, state="sharded")
    assert_equal(fit(loaded), fit(one))
    many.load_weights(FOLDER / "0.keras")
    one.load_weights(FOLDER / "0.weights.h5")
    assert_equal(many.get_weights(), one.get_weights())


class Cut(keras.callbacks.Callback):
    """Ends the fit after seven steps, without a word, the first time."""

    def __init__(self, cuts):
        super().__init__()
        self.left = 7 if cuts else -1

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise InterruptedError

    def get_state(self):
        return None

    def set_state(self, state):
        pass


def stops():
    _, many = pair(mlp)
    try:
        fit(many, epochs=3, callbacks=[lockstep.Checkpoint(FOLDER / "run", steps=2), Cut(True)])
    except InterruptedError:
        return
    raise AssertionError


def goes_on(state="sharded"):
    """In as many processes as there are, or on as many devices of one."""
    one, many = pair(mlp)
    lockstep.distribute(many, state=state)
    fit(one, epochs=3)
    cut = Cut(False)
    fit(many, epochs=3, callbacks=[lockstep.Checkpoint(FOLDER / "run", steps=2), cut])
    assert_equal(one, many)
    assert cut.left == -10, "9 of 15 steps were left"


def goes_on_replicated():
    goes_on("replicated")


def built_and_loaded_in_shards():
    """Each process holds its values on the host until it has those of process 0."""
    one, _ = pair(mlp)
    keras.utils.set_random_seed(11 + RANK)
    with lockstep.sharded():
        many = mlp()
    assert held(many) == 0
    lockstep.distribute(many, state="sharded")
    assert all(map(np.array_equal, one.get_weights(), many.get_weights()))
    assert_equal(fit(one), fit(many))
    many.save(FOLDER / "built.keras")
    with lockstep.sharded():
        loaded = keras.models.load_model(FOLDER / "built.keras")
    assert {stored_value(slot).numel() for slot in loaded.optimizer.variables[2:]} == {0}
    for state in ("sharded", "replicated"):
        lockstep.distribute(loaded, state=state)
        assert_equal(fit(one), fit(loaded))
    assert_equal(one, loaded)


def words(call):
    """The first line of an error."""
    try:
        call()
    except LockstepError as error:
        return str(error).splitlines()[0]
    return "nothing"


def writes_in_place():
    _, many = pair(mlp)
    assert (
        words(many.layers[0].parameters)
        == "parameters of 'dense' was called, but its state is sharded."
    )
    with torch.no_grad():
        for _, parameter in torch.nn.Module.named_parameters(many.layers[0]):  # around that guard
            parameter.mul_(0.5)
    for call in (many.get_weights, lambda: fit(many)):
        assert "was changed in place" in words(call)


def two_models():
    """All of them read the same one."""
    (one, many), (uno, dos) = pair(mlp), pair(mlp)
    x, y = data()
    for rows in (31, 5):
        assert_equal(*[model.train_on_batch(x[:rows], y[:rows]) for model in (one, many)])
        assert_equal(*[model.train_on_batch(x[:rows], y[:rows]) for model in (uno, dos)])
    assert "Two processes read different" in words((many, dos)[RANK > 0].layers[0].kernel.numpy)
    assert_equal(fit(one), fit(many))
    encoders = [keras.Sequential([keras.Input((13,)), model.layers[0]]) for model in (one, many)]
    assert_equal(*[encoder.predict(x, verbose=0) for encoder in encoders])
    assert_equal(one, many)
    assert_equal(uno, dos)


def alone():
    """Process 0 does what no other one does, and each of its calls ends in words."""
    one, many = pair(mlp)
    kernel, other = (layer.kernel for layer in many.layers[:2])
    calls = [
        kernel.numpy,
        lambda: kernel.assign(kernel.shape[0] * np.ones(kernel.shape)),
        lambda: many.save_weights(FOLDER / "alone.weights.h5"),
    ]
    said = list(map(words, calls)) if RANK == 0 else []
    time.sleep(3.2 * patience() if RANK else 0)
    assert_equal(fit(one), fit(many))  # which goes on
    saves = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: kernel.numpy())
    said.append(words(lambda: fit(many, callbacks=[saves] if RANK == 0 else [])))
    fit(one, epochs=1)
    assert_equal(fit(one), fit(many))
    verifies = functools.partial(lockstep.verify, many, data(), steps=1)
    calls = [(kernel if RANK else other).numpy, many.export, many.state_dict, verifies]
    print(*said, *map(words, calls), sep="\n")


class Fails(keras.optimizers.SGD):
    """Fails in process 1, in the update of the second variable."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        if RANK == 1 and "bias" in variable.path and int(self.iterations) == 1:
            raise KeyError("no such thing")


def errors():
    one, many = pair(mlp)
    fit(one)
    fit(many)

    def fails(y_true, y_pred):
        step = int(many.optimizer.iterations)
        if (RANK, step) == (1, 1):
            raise KeyError("no such thing")
        return keras.losses.mean_squared_error(y_true, y_pred)

    for model, loss in ((one, "mse"), (many, fails)):
        model.compile(keras.optimizers.Adam(0.01), loss)
    try:
        print(words(lambda: fit(many)))
    except KeyError:
        print("KeyError")
    x, y = data()
    one.train_on_batch(x[:7], y[:7])
    assert_equal(one, many)  # as after the last step of all

    many.compile(Fails(0.01), "mse")
    try:
        print(words(lambda: fit(many)))
    except KeyError:
        print("KeyError")
    print(words(many.get_weights))
    print(words(lambda: fit(many)))


def a_signal():
    """It comes in some step, and the model is as after it."""
    one, many = pair(mlp)
    kernel = many.layers[0].kernel

    class Interrupts(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            kernel.numpy()
            if batch == 2:
                os.kill(os.getpid(), signal.SIGINT)

    try:
        fit(many, callbacks=[Interrupts()])
    except KeyboardInterrupt:
        print("KeyboardInterrupt")
    x, y = data()
    one.fit(x[:14], y[:14], batch_size=7, **QUIET)
    assert_equal(values(one)[: len(one.variables)], values(many)[: len(one.variables)])


def main():
    warnings.simplefilter("ignore")
    for name in sys.argv[2:]:
        globals()[name]()
    print("the end")


if __name__ == "__main__":
    main()
