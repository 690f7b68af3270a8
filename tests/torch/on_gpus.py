"""What `test_gpus.py` runs in a process of its own, on PyTorch with GPUs, besides trainings.

python -m tests.torch.on_gpus NAME
"""

import os
import signal
import sys
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import torch
from keras import layers

import lockstep
from lockstep.errors import DeviceError, DeviceNotFound, WorkerDied
from tests.agreement import assert_equal, both, values
from tests.pretended_gpus.training import QUIET, data, network
from tests.torch.test_on_failures import workers


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
    with pytest.raises(DeviceNotFound, match=f"devices={count + 1} was requested"):
        lockstep.distribute(network(), count + 1)
    with pytest.raises(DeviceError, match="mixes cpu and gpu"):
        lockstep.distribute(network(), ["gpu:0", "cpu:0"])
    if count > 1:
        with pytest.raises(DeviceError, match="Keras creates its tensors on gpu:0"):
            lockstep.distribute(network(), ["gpu:1"])


def _trained(homes, **options):
    """Train two branches of a shared LSTM; return the model, and what it leaves.

    Dropout is left out: each GPU has random numbers of its own.
    """
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(4)
    on = [nullcontext()] * 3 if homes is None else [lockstep.on(home) for home in homes]
    a, b = keras.Input((5, 3)), keras.Input((5, 3))
    shared = layers.LSTM(4, name="shared")
    with on[0]:
        encoded_a = shared(a)
    with on[1]:
        encoded_b = layers.BatchNormalization(name="norm")(layers.Dense(4, name="b")(shared(b)))
    with on[2]:
        outputs = layers.Dense(2, name="head", kernel_regularizer="l1")(
            layers.concatenate([encoded_a, encoded_b])
        )
    model = keras.Model([a, b], outputs)
    model.compile(keras.optimizers.Adam(0.01, **options), "mse", metrics=["mae"])
    rng = np.random.default_rng(4)
    x, y = [rng.normal(size=(26, 5, 3)) for _ in "ab"], rng.normal(size=(26, 2))
    history = model.fit(x, y, batch_size=8, epochs=3, validation_split=0.2, **QUIET).history
    left = [history, model.evaluate(x, y, verbose=0), model.predict(x, verbose=0), values(model)]
    return model, left


def branches():
    """Branches on two GPUs leave what one leaves, with every weight and slot on its GPU."""
    _, one = _trained(None)
    model, many = _trained(("gpu:0", "gpu:1", "gpu:1"))
    assert_equal(one, many)
    homes = {"shared": "cuda:0", "norm": "cuda:1", "b_": "cuda:1", "head": "cuda:1"}
    for variable in [*model.variables, *model.optimizer.variables]:
        for layer, home in homes.items():
            assert layer not in variable.path or str(variable.value.device) == home, variable.path
    lockstep.release(model)
    assert {str(variable.value.device) for variable in model.variables} == {"cuda:0"}


def branches_and_cpu():
    """The head of the old recipe is on the CPU."""
    assert_equal(_trained(None)[1], _trained(("gpu:0", "gpu:1", "cpu:0"))[1])


def branches_clipped():
    """What an optimizer knows of all gradients, and what it keeps of each, on two GPUs."""
    options = {"global_clipnorm": 0.1, "use_ema": True, "weight_decay": 0.01}
    homes = ("gpu:1", "gpu:0", "gpu:1")
    assert_equal(_trained(None, **options)[1], _trained(homes, **options)[1])


CHECKS = (moved, killed, refused, branches, branches_and_cpu, branches_clipped)

if __name__ == "__main__":
    {check.__name__: check for check in CHECKS}[sys.argv[1]]()
