"""What `test_gpus.py` runs in a process of its own, on PyTorch with GPUs.

python -m tests.torch.on_gpus NAME
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import torch
from keras import layers

import lockstep
from lockstep.errors import DeviceError, DeviceNotFound, WorkerDied
from tests.torch.agreement import assert_equal, both, values
from tests.torch.test_on_failures import workers

QUIET = {"verbose": 0, "shuffle": False}


def network():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, activation="tanh", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def data(rows=23):
    rng = np.random.default_rng(4)
    return rng.normal(size=(rows, 8, 8, 3)), rng.normal(size=(rows, 2))


def several():
    """All GPUs leave what Keras alone leaves on one, and the files are those of one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    one, many = both(network, devices=None)
    x, y = data()
    results = [
        [
            model.fit(x, y, batch_size=5, epochs=3, **QUIET).history,
            model.evaluate(x, y, batch_size=5, verbose=0),
            model.predict(x, batch_size=5, verbose=0),
        ]
        for model in (one, many)
    ]
    assert_equal(*results)
    assert_equal(one, many)
    assert len(workers(os.getpid())) == torch.cuda.device_count() - 1
    with tempfile.TemporaryDirectory() as folder:
        many.save(Path(folder) / "model.keras")
        loaded = keras.models.load_model(Path(folder) / "model.keras")
    assert_equal(values(loaded), values(many))


def moved():
    """A model that was built on another GPU trains where its first replica is."""
    one, many = both(network, devices=2)
    lockstep.release(many)
    x, y = data()
    for model in (one, many):
        model.train_on_batch(x[:5], y[:5])
    torch.cuda.set_device(1)
    lockstep.distribute(many, ["gpu:1", "gpu:0"])
    result = many.train_on_batch(x[5:], y[5:])
    torch.cuda.set_device(0)
    assert_equal(one.train_on_batch(x[5:], y[5:]), result)
    assert_equal(one, many)


def killed():
    """A worker is killed: the call ends in words, and the next one starts the processes anew."""
    _, many = both(network, devices=2)
    x, y = data()
    many.fit(x, y, **QUIET)
    before = values(many)
    os.kill(workers(os.getpid())[0], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="replica 1"):
        many.fit(x, y, **QUIET)
    assert_equal(before, values(many))
    many.fit(x, y, **QUIET)


def refused():
    """More GPUs than are here, a GPU with the CPU, another GPU than that of Keras."""
    count = torch.cuda.device_count()
    with pytest.raises(DeviceNotFound, match=f"devices={count + 1} was asked for"):
        lockstep.distribute(network(), count + 1)
    with pytest.raises(DeviceError, match="of several kinds"):
        lockstep.distribute(network(), ["gpu:0", "cpu:0"])
    if count > 1:
        with pytest.raises(DeviceError, match="Keras makes its tensors on gpu:0"):
            lockstep.distribute(network(), ["gpu:1"])


if __name__ == "__main__":
    checks = {"several": several, "moved": moved, "killed": killed, "refused": refused}
    checks[sys.argv[1]]()
