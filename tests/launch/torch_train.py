"""A training of the tests on PyTorch in double precision: alone, or as one of several processes.

python torch_train.py FOLDER [FAULT RANK]
"""

import sys
from pathlib import Path

import keras
import numpy as np

import tests.torch.double  # noqa: F401  (double precision)
from tests.launch.train import Fault

OPTIONS = {"batch_size": 10, "epochs": 3, "validation_split": 0.2}


class Centred(keras.layers.Layer):
    """Looks across the batch, so that it runs whole."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


def build(seed=3):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            Centred(),
            keras.layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(53, 6)), rng.normal(size=(53, 3))


def main(folder, fault=None, at=0):
    import lockstep

    rank, size = lockstep.initialize()
    model = build(seed=3 if rank == 0 else 99)  # the weights are those of process 0
    x, y = data()
    if fault == "other rows" and rank == int(at):
        x = x + 1.0
    if size > 1:
        lockstep.distribute(model)
    callbacks = [lockstep.Checkpoint(folder / "checkpoints", steps=1)] if size > 1 else []
    if size > 1:
        callbacks.append(keras.callbacks.CSVLogger(folder / "log.csv"))
    if fault and rank == int(at):
        callbacks.append(Fault(fault, folder))
    history = model.fit(x, y, **OPTIONS, shuffle=False, verbose=2, callbacks=callbacks).history
    keras.utils.set_random_seed(5 + rank)  # the order of the rows is that of process 0
    shuffled = model.fit(x, y, batch_size=7, epochs=2, verbose=0).history
    last = [
        model.train_on_batch(x[:9], y[:9]),
        model.evaluate(x, y, batch_size=9, verbose=0),
        model.predict(x, batch_size=9, verbose=0),
        model.predict_on_batch(x[:1]),
    ]
    if size > 1:
        model.save(folder / "model.keras")
    made = [*history.values(), *shuffled.values(), *last, *model.get_weights()]
    slots = [keras.ops.convert_to_numpy(each.value) for each in model.optimizer.variables]
    arrays = [np.asarray(array) for array in [*made, *slots]]
    np.savez(folder.parent / f"{folder.name}-{rank}.npz", *arrays)
    print("trained by process", rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
