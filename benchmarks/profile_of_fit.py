"""What `lockstep.Profile` costs: a `fit` of a small model with it over one without it.

    OMP_NUM_THREADS=1 python benchmarks/profile_of_fit.py
    LOCKSTEP_STEPS_AT_ONCE=0 OMP_NUM_THREADS=1 python benchmarks/profile_of_fit.py

The fits run in turn, and each ratio is that of a pair. The first column is two fits without it: the
noise of the machine.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import time
from contextlib import redirect_stdout

import keras
import models
from rows import BATCH, data

import lockstep

STEPS = 400


def main() -> None:
    """Print the ratios, their median and the middle half."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--devices", type=int, default=1)
    asked = parser.parse_args()
    keras.utils.set_random_seed(0)
    model, (x, y) = models.mlp(), data(64, STEPS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    lockstep.distribute(model, asked.devices)
    model.compile("adam", loss, metrics=["accuracy"])

    def fit(profiled: bool) -> tuple[float, float]:
        callbacks = [lockstep.Profile(verbose=0)] if profiled else []
        wall, process = time.perf_counter(), time.process_time()
        with redirect_stdout(None):
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)
        return time.perf_counter() - wall, time.process_time() - process

    sides = {"without": False, "without, again": False, "with": True}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for each in range(asked.rounds + 1):
        for name in sorted(sides, reverse=bool(each % 2)):
            found[name].append(fit(sides[name]))
    for number, clock in enumerate(("wall", "processor")):
        plain = [times[number] for times in found["without"][1:]]
        milliseconds = statistics.median(plain) / STEPS * 1e3
        for name in ("without, again", "with"):
            ratios = [times[number] / p for times, p in zip(found[name][1:], plain, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            spread = f"{middle:.3f} [{low:.3f}, {high:.3f}]"
            print(f"{clock:10} {milliseconds:6.3f} ms a step   {name:15} {spread}", flush=True)


if __name__ == "__main__":
    main()
