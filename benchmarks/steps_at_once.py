"""When several steps in one program are faster: time per step one by one and 20 at once, on JAX.

    OMP_NUM_THREADS=1 python benchmarks/steps_at_once.py
    OMP_NUM_THREADS=1 python benchmarks/steps_at_once.py --epochs 20

A `fit` of small models runs 20 steps at once by itself, and this shows where that ends. The column
`numbers` is what `numbers_computed` counts in a step, and decides; the bound is `MOST_NUMBERS`.
The first table has an epoch of 200 steps after the programs are compiled, in processor time. With
`--epochs`, another one has whole fits of new models, compilation included, on the clock on the wall
and in processor time, beside a loop by hand. The sides run in turn, and a ratio is that of a round.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import keras
import models
from keras import layers
from loops import by_hand, compiled
from rows import BATCH, data

import lockstep
from lockstep.engines.jax.steps.scan import MOST_NUMBERS, numbers_computed

STEPS = 200
VARIABLE = "LOCKSTEP_STEPS_AT_ONCE"


def dense(width: int, depth: int = 3) -> Callable[[], keras.Model]:
    """Return a function that builds some dense layers."""

    def build() -> keras.Model:
        hidden = [layers.Dense(width, "relu") for _ in range(depth)]
        return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])

    return build


def lstm(units: int) -> Callable[[], keras.Model]:
    """Return a function that builds an LSTM over eight steps."""

    def build() -> keras.Model:
        made = [keras.Input((64,)), layers.Reshape((8, 8)), layers.LSTM(units), layers.Dense(10)]
        return keras.Sequential(made)

    return build


MODELS = {
    "mlp": models.mlp,
    "many": models.many,
    "LSTM 16": lstm(16),
    "LSTM 128": lstm(128),
    **{f"3 x {width}": dense(width) for width in (128, 256, 512, 1024)},
}
LONG = {"mlp": models.mlp, "many": models.many, "LSTM 16": lstm(16)}


def fitted(build: Callable[[], keras.Model], x: Any, y: Any, epochs: int, setting: str) -> Any:
    """Return a function that fits one model over and over."""
    model = lockstep.distribute(compiled(build), devices=1)

    def run() -> None:
        os.environ[VARIABLE] = setting
        model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)

    return run


def numbers(build: Callable[[], keras.Model], x: Any, y: Any) -> float:
    """Return what `numbers_computed` counts in a step."""
    model = compiled(build)
    model.optimizer.build(model.trainable_variables)
    model.train_on_batch(x[:BATCH], y[:BATCH])
    groups = (
        *(model.trainable_variables, model.non_trainable_variables),
        *(model.optimizer.variables, model.metrics_variables),
    )
    state = tuple([variable.value for variable in group] for group in groups)
    return numbers_computed(jax.make_jaxpr(model.train_step)(state, (x[:BATCH], y[:BATCH])).jaxpr)


def timed(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Return the seconds of one call."""
    began = clock()
    run()
    return clock() - began


def in_words(ratios: list[float]) -> str:
    """Return the median, and the least and the most."""
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=0, help="of the second table")
    given = parser.parse_args()
    x, y = data(64, STEPS)
    print(f"The bound is {MOST_NUMBERS:,} numbers.\n")
    print("| model | numbers | one by one (ms) | at once / one by one |")
    print("|---|---:|---:|---:|")
    for name, build in MODELS.items():
        one, many = (fitted(build, x, y, 1, setting) for setting in "01")
        counted = numbers(build, x, y)
        if counted > MOST_NUMBERS:  # what it would be beyond the bound
            model = compiled(build, 20)
            lockstep.distribute(model, devices=1)
            many = partial(model.fit, x, y, batch_size=BATCH, verbose=0)
        one(), many()
        pairs = [
            (timed(one, time.process_time), timed(many, time.process_time))
            for _ in range(given.rounds)
        ]
        step = statistics.median(single for single, _ in pairs) / STEPS * 1e3
        ratios = [at_once / single for single, at_once in pairs]
        print(f"| {name} | {counted:,.0f} | {step:.2f} | {in_words(ratios)} |", flush=True)
    if not given.epochs:
        return
    print(f"\nFits of {given.epochs} epochs of {2 * STEPS} steps, with compilation:\n")
    print("| model | wall, at once / one by one | processor time | wall, at once / by hand |")
    print("|---|---:|---:|---:|")
    x, y = data(64, 2 * STEPS)
    for name, build in LONG.items():
        found: list[tuple[float, float, float]] = []
        for _ in range(given.rounds):
            walls, works = [], []
            for setting in "01":
                began, worked = time.perf_counter(), time.process_time()
                fitted(build, x, y, given.epochs, setting)()
                walls.append(time.perf_counter() - began)
                works.append(time.process_time() - worked)
            epoch = by_hand(compiled(build), x, y)
            hand = timed(lambda run=epoch: [run() for _ in range(given.epochs)], time.perf_counter)
            found.append((walls[1] / walls[0], works[1] / works[0], walls[1] / hand))
        print(
            f"| {name} | {' | '.join(in_words(list(each)) for each in zip(*found, strict=True))} |"
        )


if __name__ == "__main__":
    main()
