"""CPU time per step: a hand-written JAX loop, stock Keras, lockstep.

    KERAS_BACKEND=jax OMP_NUM_THREADS=1 python benchmarks/trainer_tax.py
    LOCKSTEP_REHEARSE=4 python benchmarks/trainer_tax.py --devices 4

All sides run the same model on the same shuffled rows with the same loss and metrics,
in turn in one process, round after round; the progress bar is on for the fits, with
stock callbacks attached, and each runs once more with `steps_per_execution=20`.
`--calls evaluate predict` does the same for those, and
`--calls train_on_batch test_on_batch predict_on_batch` compares these methods with Keras's own.
On several devices the loop by hand is jitted over the same mesh, and Keras's side is its own
answer, `keras.distribution.DataParallel`. What is compared is `time.process_time`, which a busy
machine disturbs less than the clock on the wall, and the ratio within each round. `--json` prints
everything as one object.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import keras
import models
import numpy as np
from loops import (
    Run,
    barest_by_hand,
    by_batches,
    by_evaluate,
    by_fit,
    by_hand,
    by_predict,
    compiled,
    evaluated_by_hand,
    predicted_by_hand,
)
from rows import BATCH, data

import lockstep

MODELS = {name: getattr(models, name) for name in ("mlp", "many", "cnn", "transformer")}
STEPS = {"mlp": 1000, "many": 200, "cnn": 200, "transformer": 200}
ROUNDS = {"mlp": 45, "many": 15, "cnn": 15, "transformer": 15}
"""The smaller the step, the more its rounds scatter on a shared machine."""
HAND = "by hand"
Sides = Callable[..., dict[str, Run]]


# ------------------------------------------------------------------------ the numbers


def fits(name: str, devices: int, x: np.ndarray, y: np.ndarray) -> dict[str, Run]:
    """The sides of `fit`, and the shortest loop, which does less."""
    barest = barest_by_hand(compiled(MODELS[name]), x, y, devices=devices)
    return {**_sides(name, devices, by_hand, by_fit, x, y), "by hand, no metrics": barest}


def evaluations(name: str, devices: int, x: np.ndarray, y: np.ndarray) -> dict[str, Run]:
    """The sides of `evaluate`."""
    return _sides(name, devices, evaluated_by_hand, by_evaluate, x, y)


def _sides(
    name: str,
    devices: int,
    hand: Callable[..., Run],
    run: Callable[..., Run],
    *rows: np.ndarray,
) -> dict[str, Run]:
    model = MODELS[name]
    return {
        HAND: hand(compiled(model), *rows, devices=devices),
        "keras": stock(name, devices, run, *rows),
        "lockstep": run(ours(name, devices), *rows),
        "keras, 20 at once": stock(name, devices, run, *rows, times=20),
        "lockstep, 20 at once": run(ours(name, devices, 20), *rows),
    }


def predictions(name: str, devices: int, x: np.ndarray, y: np.ndarray) -> dict[str, Run]:
    """The sides of `predict`."""
    return _sides(name, devices, predicted_by_hand, by_predict, x)


def _on_batch(method: str) -> Sides:
    """The sides of a method that takes one batch, the first of which is Keras's."""
    parts = 1 if method == "predict_on_batch" else 2

    def sides(name: str, devices: int, *rows: np.ndarray) -> dict[str, Run]:
        run, rows = by_batches(method), rows[:parts]
        keras_own = stock(name, devices, run, *rows)
        return {"keras": keras_own, "lockstep": run(ours(name, devices), *rows)}

    return sides


CALLS: dict[str, Sides] = {
    "fit": fits,
    "evaluate": evaluations,
    "predict": predictions,
    **{f"{kind}_on_batch": _on_batch(f"{kind}_on_batch") for kind in ("train", "test", "predict")},
}


def ours(name: str, devices: int, times: int = 1) -> keras.Model:
    """The model under lockstep."""
    return lockstep.distribute(compiled(MODELS[name], times), devices=devices)


def stock(
    name: str, devices: int, run: Callable[..., Run], *rows: np.ndarray, times: int = 1
) -> Run:
    """Stock Keras, on several devices as its `DataParallel` lays a model out."""
    layout = None
    if devices > 1:
        names = [f"{device.platform}:{device.id}" for device in jax.devices()[:devices]]
        layout = keras.distribution.DataParallel(devices=names, auto_shard_dataset=False)
    keras.distribution.set_distribution(layout)
    try:
        call = run(compiled(MODELS[name], times), *rows)
    finally:
        keras.distribution.set_distribution(None)

    def distributed() -> None:
        keras.distribution.set_distribution(layout)
        try:
            call()
        finally:
            keras.distribution.set_distribution(None)

    return distributed


def measure(name: str, call: str, devices: int, rounds: int, steps: int) -> dict[str, Any]:
    """CPU milliseconds per step of each side, and the ratios to the first in each round."""
    x, y = data(compiled(MODELS[name]).input_shape[1], steps)
    sides = CALLS[call](name, devices, x, y)
    once = CALLS[call](name, devices, x[:BATCH], y[:BATCH])
    calls = {side: _milliseconds(once[side]) for side in ("keras", "lockstep")}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 2):
        order = list(sides) if number % 2 else list(reversed(sides))
        for side in order:
            start = time.process_time()
            sides[side]()
            if number >= 2:  # the first two compile and warm up
                times[side].append((time.process_time() - start) * 1e3 / steps)
    first = next(iter(sides))
    ratios = {
        side: sorted(mine / other for mine, other in zip(times[side], times[first], strict=True))
        for side in sides
    }
    return {
        "model": name,
        "call": call,
        "devices": devices,
        "steps per round": steps,
        "rounds": rounds,
        "milliseconds of a call of one step": calls,
        "milliseconds": {side: statistics.median(values) for side, values in times.items()},
        "ratio": {side: statistics.median(values) for side, values in ratios.items()},
        "quartiles": {
            side: [values[len(values) // 4], values[-1 - len(values) // 4]]
            for side, values in ratios.items()
        },
    }


def _milliseconds(run: Run) -> float:
    times = []
    for _ in range(7):
        start = time.process_time()
        run()
        times.append((time.process_time() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=["fit"])
    parser.add_argument(
        "--devices", type=int, default=1, help=f"how many; they have to divide {BATCH}"
    )
    parser.add_argument("--rounds", type=int, help="the model's own by default")
    parser.add_argument("--steps", type=int, help="steps per round; the model's own by default")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    before = os.getloadavg()[0]
    results = []
    for name in arguments.models:
        often = arguments.rounds or ROUNDS[name], arguments.steps or STEPS[name]
        results += [measure(name, call, arguments.devices, *often) for call in arguments.calls]
    around = {
        "load average": [before, os.getloadavg()[0]],
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            "keras": keras.__version__,
            "jax": jax.__version__,
        },
    }
    if arguments.json:
        print(json.dumps({"results": results, **around}, indent=1))
        return
    print("CPU time per step; ratio to the first of each, median [quartiles] of the rounds")
    for result in results:
        print(f"{result['model']}, {result['call']}:")
        for side, milliseconds in result["milliseconds"].items():
            low, high = result["quartiles"][side]
            ratio = result["ratio"][side]
            print(f"  {side:20} {milliseconds:8.3f} ms   {ratio:5.2f} [{low:.2f}, {high:.2f}]")
        calls = result["milliseconds of a call of one step"].items()
        print("  a call of one step:", ", ".join(f"{side} {call:.1f} ms" for side, call in calls))
    print(around)


if __name__ == "__main__":
    main()
