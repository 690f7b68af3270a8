"""What the check of the first step costs on TensorFlow and PyTorch: with it and without it.

    pip install -e ".[benchmarks]"
    python benchmarks/first_step.py --backend torch

Each model has a layer of its own, so that its first step is compared with one device. Every
measurement is a process of its own, and the two sides take turns. The first steps of two models of
the same kind run in it: the first one starts the devices, and the second one is measured. A later
step of the second model is measured too: the check costs nothing there.
"""

import argparse
import json
import os
import subprocess
import sys
import time

from peers import spread

MODELS = {"mlp": 64, "cnn": 256, "transformer": 256}
ROWS = 64


def measure(name: str, devices: int) -> None:
    """One process: the seconds of the first step of a model, and of a later one."""
    import keras
    import models
    import numpy as np

    import lockstep

    class Scaled(keras.layers.Layer):
        def call(self, x):
            return x * 1.5

    lockstep.rehearse(devices=devices)
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(ROWS, MODELS[name])).astype("float32")
    y = numbers.integers(0, 10, ROWS)
    seconds = []
    for _ in range(2):
        inner = getattr(models, name)()
        inputs = keras.Input(inner.input_shape[1:])
        made = keras.Model(inputs, inner(Scaled()(inputs)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(keras.optimizers.Adam(), loss, jit_compile=False)
        lockstep.distribute(made, devices=devices)
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            made.train_on_batch(x, y)
            seconds.append(time.perf_counter() - start)
    print(json.dumps([seconds[0], min(seconds[2:])]))


def in_words(values: list[float]) -> str:
    """Return the median and its quartiles."""
    median, low, high = spread(values)
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    """Print the medians, with the quartiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="torch", choices=["tensorflow", "torch"])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", choices=MODELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.devices)
        return
    for name in MODELS:
        found: dict[str, list[list[float]]] = {"1": [], "0": []}
        for _ in range(options.rounds):
            for check, times in found.items():
                environment = os.environ | {
                    "KERAS_BACKEND": options.backend,
                    "LOCKSTEP_CHECK": check,
                    "OMP_NUM_THREADS": "1",
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                }
                command = [sys.executable, __file__, "--measure", name]
                command += ["--devices", str(options.devices)]
                done = subprocess.run(command, env=environment, capture_output=True, check=True)
                times.append(json.loads(done.stdout.splitlines()[-1]))
        for number, which in enumerate(("first step", "later step")):
            sides = [[each[number] for each in found[check]] for check in ("1", "0")]
            ratios = [a / b for a, b in zip(*sides, strict=True)]
            print(
                f"{options.backend} {name}, {which}: {in_words(sides[0])} s with the check, "
                f"{in_words(sides[1])} s without; ratio {in_words(ratios)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
