"""CPU time per training step on TensorFlow: lockstep beside stock Keras, on one device and two.

    pip install -e ".[benchmarks]"
    python benchmarks/tensorflow_tax.py

Every side trains the same network on the same rows in batches of 32 with Adam and keeps
the loss and the accuracy, with progress bar and stock callbacks. On one device lockstep is
beside stock `fit`; on two virtual devices beside stock `tf.distribute.MirroredStrategy`,
where that is right: even batches, a mean loss, no batch norm. Each number of devices has a
process of its own; the sides of one take turns in it. What is measured is
`time.process_time`, all threads together, which a busy machine disturbs less than the clock
on the wall, and the ratio within each round.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import time
from typing import Any

from peers import ratio, spread
from rows import BATCH, data, texts
from workers import Worker, answer

WIDTH = {"mlp": 64, "cnn": 256, "transformer": 256, "words": 64}
STEPS = {"mlp": 200, "cnn": 100, "transformer": 100, "words": 8}
OURS, STOCK, NO_XLA = "lockstep", "stock", "stock without XLA"


def worker(name: str, devices: int, steps: int, times: int) -> None:
    """One process: CPU milliseconds per step of the side whose name comes in."""
    import models
    import tensorflow as tf
    from loops import by_fit, compiled

    import lockstep

    lockstep.rehearse(devices=devices)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    build = getattr(models, name)
    x, y = texts(WIDTH[name], models.WORDS, steps) if name == "words" else data(WIDTH[name], steps)
    others = {}
    if devices == 1:
        stock = by_fit(compiled(build, times), x, y)
    else:
        across = tf.distribute.ReductionToOneDevice()
        names = [f"cpu:{number}" for number in range(devices)]
        with tf.distribute.MirroredStrategy(names, cross_device_ops=across).scope():
            stock = by_fit(compiled(build, times), x, y)
            plain = compiled(build, times)
            plain.jit_compile = False
            others = {NO_XLA: by_fit(plain, x, y)}
    ours = by_fit(lockstep.distribute(compiled(build, times), devices=devices), x, y)
    sides = {OURS: ours, STOCK: stock, **others}
    for run in [*sides.values()] * 2:  # trace, and warm up
        run()
    answer(list(sides))
    with contextlib.suppress(EOFError):
        while True:
            run = sides[input()]
            start = time.process_time()
            run()
            answer((time.process_time() - start) * 1e3 / steps)


def measure(name: str, devices: int, rounds: int, steps: int, times: int) -> dict[str, Any]:
    """Milliseconds of both sides, and their ratios within each round."""
    before = os.getloadavg()[0]
    arguments = ("--worker", devices, "--models", name, "--steps", steps, "--times", times)
    process = Worker(__file__, *arguments, KERAS_BACKEND="tensorflow")
    process.wait()
    taken: dict[str, list[float]] = {side: [] for side in process.said}
    for number in range(rounds):
        for side in taken if number % 2 else reversed(taken):
            process.ask(side)
            taken[side].append(process.answer())
    process.end()
    process.wait_for_end()
    return {
        "model": name,
        "devices": devices,
        "steps per execution": times,
        "steps per round": steps,
        "rounds": rounds,
        "load average": [before, os.getloadavg()[0]],
        "milliseconds": {side: spread(values) for side, values in taken.items()},
        "lockstep over": {
            side: ratio(taken[OURS], values) for side, values in taken.items() if side != OURS
        },
    }


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=WIDTH, default=list(WIDTH))
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, help="steps per round; the model's own by default")
    parser.add_argument("--times", type=int, default=1, help="steps_per_execution")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(asked.models[0], asked.worker, asked.steps, asked.times)
        return
    results = []
    for name in asked.models:
        for devices in asked.devices:
            steps = asked.steps or STEPS[name]
            results.append(measure(name, devices, asked.rounds, steps, asked.times))
            if not asked.json:
                show(results[-1])
    around = {
        "rows per step": BATCH,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "keras": importlib.metadata.version("keras"),
    }
    print(json.dumps({"results": results, **around}, indent=1) if asked.json else around)


def show(result: dict[str, Any]) -> None:
    """A line for a person for each comparison."""
    load = " to ".join(f"{each:.1f}" for each in result["load average"])
    ours = result["milliseconds"][OURS][0]
    for side, ratios in result["lockstep over"].items():
        ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*ratios)
        print(
            f"{result['model']:12} {result['devices']} devices: {ours:7.2f} ms, {side} "
            f"{result['milliseconds'][side][0]:7.2f} ms, ratio {ratio}, load {load}",
            flush=True,
        )


if __name__ == "__main__":
    main()
