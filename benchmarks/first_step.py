"""What a user waits for before the first step: lockstep beside stock Keras, in fresh processes.

    pip install -e ".[benchmarks]"
    python benchmarks/first_step.py                       # all rows
    python benchmarks/first_step.py --rows parts devices  # some of them
    python benchmarks/first_step.py --check torch         # what the check of the first step costs

Every figure is that of a fresh process, up to the end of the first step of a `fit`, imports
included. It is processor time, but for the row `two`, whose workers start side by side: that row
has the clock on the wall. Sides take turns, and a ratio is that of one round. JAX keeps no compiled
programs here.

With `--check`, each model has a layer of its own, so that its first step is compared with one
device. The first steps of two models of the same kind run in a process: the first one starts the
devices, and the second one is measured. A later step of the second model is measured too: the check
costs nothing there.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from peers import spread

# ------------------------------------------------------------------- beside stock Keras


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        words: What is measured.
        model: The function of `models` that builds it.
        given: What `distribute` gets.
        backend: The backend of Keras.
        on_the_wall: Whether it is the clock on the wall that counts.
        steps: The number of the step whose end counts.
        traced: Whether lockstep traces steps, on PyTorch.
    """

    words: str
    model: str
    given: dict[str, int] = field(default_factory=dict)
    backend: str = "jax"
    on_the_wall: bool = False
    steps: int = 1
    traced: bool = False


BATCH = 32
ROWS = {
    "one": Row("transformer, JAX, one device", "six_blocks", {"devices": 1}),
    "parts": Row(
        "transformer, JAX, one device in four parts",
        "six_blocks",
        {"devices": 1, "micro_batch_size": BATCH // 4},
    ),
    "devices": Row("transformer, JAX, four devices", "six_blocks", {"devices": 4}),
    "resnet": Row("ResNet-50, JAX, four devices", "resnet_of_small_pictures", {"devices": 4}),
    "two": Row(
        "CNN, PyTorch, two processes", "cnn", {"devices": 2}, backend="torch", on_the_wall=True
    ),
    "traced": Row(
        "CNN, PyTorch, one device, first traced step",
        "cnn",
        {"devices": 1},
        backend="torch",
        steps=2,
        traced=True,
    ),
}


def first_step(row: Row, *, distributed: bool) -> None:
    """One process: the clocks at the end of the first step of a `fit`."""
    import keras
    import models
    import numpy as np
    from loops import compiled

    devices = row.given["devices"]
    if distributed:
        import lockstep

        if devices > 1:
            lockstep.rehearse(devices=devices)
    model = compiled(getattr(models, row.model))
    if distributed:
        lockstep.distribute(model, **row.given)
        model.jit_compile = row.traced or model.jit_compile
    numbers, shape = np.random.default_rng(0), model.input_shape[1:]
    rows = BATCH * row.steps
    x = numbers.normal(size=(rows, *shape)).astype("float32")
    if "int" in model.inputs[0].dtype:
        x = numbers.integers(0, 512, (rows, *shape))
    y = numbers.integers(0, 10, rows)

    def note(batch: int, logs: dict[str, Any]) -> None:
        float(logs["loss"])  # waits for the step
        wall = time.time() - float(os.environ["FIRST_STEP_STARTED"])
        print(json.dumps([wall, time.process_time()]), flush=True)

    at_end = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[at_end])


def measured(name: str, side: str, tree: str | None) -> float:
    """Return the seconds of one side of a row."""
    row = ROWS[name]
    environment = os.environ | {
        "KERAS_BACKEND": row.backend,
        "OMP_NUM_THREADS": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "FIRST_STEP_STARTED": str(time.time()),
    }
    if tree and side == "lockstep":
        environment["PYTHONPATH"] = tree
    command = [sys.executable, __file__, "--measure", name, side]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    wall, cpu = json.loads(done.stdout.splitlines()[-1])
    return wall if row.on_the_wall else cpu


def beside_keras(names: list[str], rounds: int, tree: str | None) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| first step | stock Keras (s) | lockstep (s) | ratio | more (s) |"
    yield "|---|---:|---:|---:|---:|"
    for name in names:
        pairs = [
            (measured(name, "keras", tree), measured(name, "lockstep", tree)) for _ in range(rounds)
        ]
        columns = [[one for one, _ in pairs], [other for _, other in pairs]]
        columns += [[b / a for a, b in pairs], [b - a for a, b in pairs]]
        clock = " (wall)" if ROWS[name].on_the_wall else ""
        yield f"| {ROWS[name].words}{clock} | {' | '.join(map(in_words, columns))} |"


# ---------------------------------------------------------- what the check itself costs

CHECKED = {"mlp": 64, "cnn": 256, "transformer": 256}
CHECKED_ROWS = 64


def checked_step(name: str, devices: int) -> None:
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
    x = numbers.normal(size=(CHECKED_ROWS, CHECKED[name])).astype("float32")
    y = numbers.integers(0, 10, CHECKED_ROWS)
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


def with_and_without(backend: str, devices: int, rounds: int) -> Iterator[str]:
    """Yield a line for the first step of each model, and one for a later step."""
    for name in CHECKED:
        found: dict[str, list[list[float]]] = {"1": [], "0": []}
        for _ in range(rounds):
            for check, times in found.items():
                environment = os.environ | {
                    "KERAS_BACKEND": backend,
                    "LOCKSTEP_CHECK": check,
                    "OMP_NUM_THREADS": "1",
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                }
                command = [sys.executable, __file__, "--measure", name, str(devices)]
                done = subprocess.run(command, env=environment, capture_output=True, check=True)
                times.append(json.loads(done.stdout.splitlines()[-1]))
        for number, which in enumerate(("first step", "later step")):
            sides = [[each[number] for each in found[check]] for check in ("1", "0")]
            ratios = [a / b for a, b in zip(*sides, strict=True)]
            yield (
                f"{backend} {name}, {which}: {in_words(sides[0])} s with the check, "
                f"{in_words(sides[1])} s without; ratio {in_words(ratios)}"
            )


def in_words(values: list[float]) -> str:
    """Return the median and its quartiles."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    median, low, high = spread(values)
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    """Print the medians, with the quartiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tree", help="a folder `src` of another lockstep, to compare with")
    parser.add_argument("--check", choices=["tensorflow", "torch"], help="of that backend alone")
    parser.add_argument("--devices", type=int, default=2, help="for --check")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        name, side = options.measure
        if name in ROWS:
            first_step(ROWS[name], distributed=side == "lockstep")
        else:
            checked_step(name, int(side))
        return
    if options.check:
        lines = with_and_without(options.check, options.devices, options.rounds)
    else:
        lines = beside_keras(options.rows, options.rounds, options.tree)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
