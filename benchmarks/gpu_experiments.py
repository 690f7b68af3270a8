"""Single questions that only a GPU answers: python benchmarks/gpu_experiments.py NAME.

Each ends with status 0 where the answer is the one that lockstep relies on. Those of PyTorch need
two devices: two GPUs, or `LOCKSTEP_SHARE_GPU=2`. `gpu_check.py` runs them, each within a limit: two
of them hung once.
"""

import os
import signal
import sys

import numpy as np


def remat():
    """Does a layer with `torch.utils.checkpoint` train with its state in shards?"""
    import keras
    from torch.utils.checkpoint import checkpoint

    import lockstep

    class Block(keras.layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.inner = keras.layers.Dense(512, "relu")

        def build(self, shape):
            self.inner.build(shape)

        def call(self, inputs):
            return checkpoint(self.inner, inputs, use_reentrant=False)

        def compute_output_shape(self, shape):
            return (*shape[:-1], 512)

    losses = []
    for devices in (1, 2):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((64,))
        hidden = Block()(keras.layers.Dense(512)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
        model.compile("sgd", "mse")
        lockstep.distribute(model, devices, state="sharded" if devices > 1 else "replicated")
        x, y = np.ones((32, 64), "float32"), np.ones((32, 3), "float32")
        losses.append(model.fit(x, y, batch_size=16, verbose=0).history["loss"])
    print(losses)
    np.testing.assert_allclose(*losses, rtol=1e-4)


def penalty():
    """Does a step with a gradient of a gradient end, with the losses of one device?"""
    import keras

    import lockstep
    from tests.torch.test_on_own_steps import Gan

    x = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
    losses = []
    for devices in (1, 2):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        model = Gan()
        model.compile(optimizer=keras.optimizers.SGD(0.05))
        lockstep.distribute(model, devices)
        history = model.fit(x, batch_size=7, epochs=2, shuffle=False, verbose=0).history
        losses.append(list(history.values()))
    print(losses)
    np.testing.assert_allclose(*losses, rtol=1e-3)


def killed():
    """Is a worker that is killed an error in words, and does the next call train?"""
    import keras
    from tests.torch.common import workers

    import lockstep
    from lockstep.errors import WorkerDied

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    lockstep.distribute(model, 2)
    x = np.ones((8, 3), "float32")
    model.fit(x, x[:, :2], verbose=0)
    os.kill(workers(os.getpid())[0], signal.SIGKILL)
    try:
        model.fit(x, x[:, :2], verbose=0)
    except WorkerDied as error:
        print("WorkerDied:", str(error).splitlines()[0])
    else:
        sys.exit("the call of a killed worker returned")
    model.fit(x, x[:, :2], verbose=0)


def tf32_rows():
    """How far is a row in a smaller batch from itself? The first step allows 1e-4."""
    import keras
    from keras import ops

    rng = np.random.default_rng(0)
    pictures = rng.normal(size=(9, 24, 24, 64)).astype("float32")
    kernel = rng.normal(size=(3, 3, 64, 64)).astype("float32")
    rows, matrix = (rng.normal(size=(n, 1024)).astype("float32") for n in (9, 1024))

    def both(count):
        found = ops.conv(pictures[:count], kernel, padding="same"), ops.matmul(rows[:count], matrix)
        return [keras.ops.convert_to_numpy(each) for each in found]

    worst, whole = 0.0, both(9)
    for count in (1, 2, 3, 5):
        for one, all_rows in zip(both(count), whole, strict=True):
            right = all_rows[:count]
            worst = max(worst, float(np.linalg.norm(one - right) / np.linalg.norm(right)))
    print(f"{keras.backend.backend()}: {worst:.1e} from itself")
    sys.exit(worst > 1e-4)


def h2d_race():
    """Is a host array that changes right after `device_put` seen as it was?"""
    import jax

    seen = 0
    for megabytes in (1, 16, 256):
        for _ in range(5):
            host = np.zeros(megabytes * 2**18, "float32")
            there = jax.device_put(host)
            host[:] = 1
            seen += int(float(there.max()) != 0)
    # lockstep hands over rows of the user's arrays only where no code runs between two steps.
    print(f"a write after device_put was seen {seen} of 15 times")


def logical():
    """Does a step over two logical GPUs of TensorFlow end, with NCCL or without it?"""
    import tensorflow as tf

    (card,) = tf.config.list_physical_devices("GPU")[:1]
    part = tf.config.LogicalDeviceConfiguration(memory_limit=8000)
    tf.config.set_logical_device_configuration(card, [part] * 2)
    import keras

    import lockstep

    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16), keras.layers.BatchNormalization()]
    )
    model.compile("adam", "mse")
    lockstep.distribute(model, 2)
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    print(model.fit(x, np.tile(x, 2), batch_size=15, verbose=0).history)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
