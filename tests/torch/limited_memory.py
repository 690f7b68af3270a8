"""Trains on four devices whose workers may take 400 MiB more each; prints the loss, or an error.

python limited_memory.py STATE

One device alone trains it for any other state than "replicated" and "sharded", without a limit.
MALLOC_MMAP_THRESHOLD_=1000000 has to be set: by default glibc keeps the memory of freed tensors.
"""

import os
import resource
import sys

import keras
import numpy as np

import lockstep
from tests.torch.test_on_failures import workers

WIDTH, LIMIT = 1024, 400 * 2**20


def limit_workers():
    keras.utils.set_random_seed(1)
    small = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    lockstep.distribute(small, 4).predict(np.ones((4, 4)), verbose=0)
    for worker in workers(os.getpid()):
        with open(f"/proc/{worker}/status") as file:
            (kilobytes,) = (line.split()[1] for line in file if line.startswith("VmData"))
        most = int(kilobytes) * 1024 + LIMIT
        resource.prlimit(worker, resource.RLIMIT_DATA, (most, most))


def main(state):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, "relu") for _ in range(24)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    if state in ("replicated", "sharded"):
        limit_workers()
        lockstep.distribute(model, 4, state=state)
    x = np.random.default_rng(0).normal(size=(16, WIDTH)).astype("float32")
    try:
        print(model.fit(x, x[:, :1], batch_size=8, verbose=0, shuffle=False).history["loss"][0])
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0])


if __name__ == "__main__":
    main(sys.argv[1])
