"""CPU time per training step: lockstep beside its peers, on three backends.

    pip install -e ".[benchmarks]"
    python benchmarks/peers.py

Every side trains the same network, with as many parameters, on the same rows in batches of
32 with Adam, and keeps the mean loss and the accuracy. The sides of one backend take turns
in one process; the three processes take turns on one core, round after round. What is
measured is `time.process_time` within each process, which a busy machine disturbs less than
the clock on the wall. The fits have their progress bar and stock callbacks; the PyTorch
loops have neither, and slice tensors instead of asking a `DataLoader`. The loop by hand in
TensorFlow uses XLA where the `fit` beside it does, which on CPUs is nowhere.

With `--platform gpu` all of this is on one GPU, for libraries that have come with their CUDA: the
clock on the wall counts then, nothing is pinned, and each library has its own default for the
precision of products of matrices. Every side sends each batch to the device.

`--write` also draws the picture of docs/performance.md. `--draw` draws it of the table that is
on the page, and measures nothing.

One process, one device: this is what each library costs before any device talks to another
(`two_processes.py` has two that talk). A peer that is not installed is said to be so.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import socket
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hardware import CLOCKS, add_platform, check, described, environment, require
from rows import BATCH, data
from workers import Worker, answer, pin

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
PICTURE = PAGE.with_name("images") / "peers.png"
WIDTH = {"mlp": 64, "cnn": 256, "transformer": 256}
STEPS = {"mlp": 1000, "cnn": 200, "transformer": 200}
BY_HAND = {"jax": "by hand", "tensorflow": "by hand, TensorFlow", "torch": "by hand, PyTorch"}
OURS = "lockstep"
VERSIONS = (
    *("keras", "jax", "tensorflow", "tensorflow-cpu", "torch", "accelerate"),
    "lightning-fabric",
)

Sides = dict[str, Callable[[], None]]


# ------------------------------------------------------------------- the three backends


def on_jax(name: str, x: Any, y: Any, platform: str) -> tuple[int, Sides, dict[str, str]]:
    import jax
    import keras
    import models
    from loops import by_fit, by_hand, compiled

    import lockstep

    check(platform, f"JAX {jax.__version__}", jax.default_backend())
    build = getattr(models, name)
    layout = keras.distribution.DataParallel(devices=[f"{platform}:0"])

    @contextlib.contextmanager
    def distribution() -> Any:
        keras.distribution.set_distribution(layout)
        try:
            yield
        finally:
            keras.distribution.set_distribution(None)

    with distribution():
        data_parallel = by_fit(compiled(build), x, y)

    def in_distribution() -> None:
        with distribution():
            data_parallel()

    sides = {
        OURS: by_fit(lockstep.distribute(compiled(build), 1), x, y),
        BY_HAND["jax"]: by_hand(compiled(build), x, y),
        "keras fit": by_fit(compiled(build), x, y),
        "keras.distribution.DataParallel": in_distribution,
    }
    return build().count_params(), sides, {}


def on_tensorflow(name: str, x: Any, y: Any, platform: str) -> tuple[int, Sides, dict[str, str]]:
    import models
    import tensorflow as tf
    from loops import by_fit, by_hand_tensorflow, compiled

    found = "gpu" if tf.config.list_physical_devices("GPU") else "cpu"
    check(platform, f"TensorFlow {tf.__version__}", found)
    if platform == "cpu":
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    build = getattr(models, name)
    with tf.distribute.MirroredStrategy([f"/{platform}:0"]).scope():
        mirrored = by_fit(compiled(build), x, y)
    sides = {
        BY_HAND["tensorflow"]: by_hand_tensorflow(compiled(build), x, y),
        "keras fit, TensorFlow": by_fit(compiled(build), x, y),
        "tf.distribute.MirroredStrategy": mirrored,
    }
    return build().count_params(), sides, {}


def on_torch(name: str, x: Any, y: Any, platform: str) -> tuple[int, Sides, dict[str, str]]:
    import torch
    import torch_loops

    device = torch_loops.device_for(platform)
    if platform == "cpu":
        torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(torch_loops.environment(platform, 0, 1, port))
    x, y = torch.from_numpy(x), torch.from_numpy(y).long()
    made = {
        BY_HAND["torch"]: torch_loops.alone,
        "PyTorch DistributedDataParallel": torch_loops.data_parallel,
        "Hugging Face Accelerate": torch_loops.accelerate,
        "Lightning Fabric": torch_loops.fabric,
    }
    sides, missing = {}, {}
    for side, make in made.items():
        torch.manual_seed(0)
        model = getattr(torch_loops, name)().to(device)
        count = torch_loops.parameters(model)
        try:
            model, optimizer, backward = make(model, lambda p: torch.optim.Adam(p, 1e-3))
        except ImportError as error:
            missing[side] = str(error)
            continue
        sides[side] = torch_loops.epoch(model, optimizer, x, y, backward)
    return count, sides, missing


BACKENDS = {"jax": on_jax, "tensorflow": on_tensorflow, "torch": on_torch}


def worker(backend: str, name: str, steps: int, platform: str) -> None:
    """One process: milliseconds per step of the side whose name comes in."""
    if platform == "cpu":
        pin(0)
    x, y = data(WIDTH[name], steps)
    try:
        count, sides, missing = BACKENDS[backend](name, x, y, platform)
    except ImportError as error:
        count, sides, missing = 0, {}, {BY_HAND[backend] + " and its peers": str(error)}
    for run in [*sides.values()] * 2:  # compile, and warm up
        run()
    answer({"parameters": count, "sides": list(sides), "missing": missing})
    clock = CLOCKS[platform]
    with contextlib.suppress(EOFError):
        while True:
            run = sides[input()]
            start = clock()
            run()
            answer((clock() - start) * 1e3 / steps)


# -------------------------------------------------------------------------- the figures


def measure(name: str, rounds: int, steps: int, platform: str) -> dict[str, Any]:
    """Milliseconds of every side, and their ratios within each round."""
    before = os.getloadavg()[0]
    workers = {}
    for backend in BACKENDS:  # one after the other: they would share a core
        arguments = ("--worker", backend, "--models", name, "--steps", steps)
        arguments += ("--platform", platform)
        around = {"KERAS_BACKEND": backend, **environment(platform)}
        workers[backend] = Worker(__file__, *arguments, **around)
        workers[backend].wait()
    if OURS not in workers["jax"].said["sides"]:
        for each in workers.values():
            each.end()
        raise SystemExit(f"Nothing to compare with: {workers['jax'].said['missing']}")
    counts = {each.said["parameters"] for each in workers.values() if each.said["sides"]}
    if len(counts) != 1:
        raise SystemExit(f"{name} is not one model on all backends: {counts} parameters.")
    turns = [(backend, side) for backend, each in workers.items() for side in each.said["sides"]]
    times: dict[str, list[float]] = {side: [] for _, side in turns}
    for number in range(rounds):
        for backend, side in turns if number % 2 else reversed(turns):
            workers[backend].ask(side)
            times[side].append(workers[backend].answer())
    for each in workers.values():
        each.end()
        each.wait_for_end()
    own = {side: BY_HAND[backend] for backend, side in turns}
    return {
        "model": name,
        "parameters": counts.pop(),
        "steps per round": steps,
        "rounds": rounds,
        "time": "of the CPU" if platform == "cpu" else "by the clock, on one GPU",
        "device": described(platform),
        "load average": [before, os.getloadavg()[0]],
        "milliseconds": {side: spread(values) for side, values in times.items()},
        "over lockstep": {side: ratio(times[side], times[OURS]) for side in times},
        "over a loop by hand on its backend": {
            side: ratio(times[side], times[own[side]]) for side in times
        },
        "left out": {k: v for each in workers.values() for k, v in each.said["missing"].items()},
    }


def ratio(some: list[float], others: list[float]) -> list[float]:
    """Median and quartiles of the ratios, round by round."""
    return spread([one / other for one, other in zip(some, others, strict=True)])


def spread(values: list[float]) -> list[float]:
    """Median, and first and third quartile, of what was measured and no further."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [statistics.median(values), low, high]


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=WIDTH, default=list(WIDTH))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, help="steps per round; the model's own by default")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"also draw {PICTURE.name}")
    parser.add_argument(
        "--draw", action="store_true", help="draw it of the page, without measuring"
    )
    add_platform(parser)
    parser.add_argument("--worker", choices=BACKENDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.models[0], arguments.steps, arguments.platform)
        return
    if arguments.draw:
        draw(ratios_on(PAGE.read_text()))
        return
    require(arguments.platform, 1)
    results = []
    for name in arguments.models:
        steps = arguments.steps or STEPS[name]
        results.append(measure(name, arguments.rounds, steps, arguments.platform))
        if not arguments.json:
            show(results[-1])
    if arguments.write:
        draw({each["model"]: each["over lockstep"] for each in results})
    around = {"rows per step": BATCH, "cores": os.cpu_count(), "versions": versions()}
    print(json.dumps({"results": results, **around}, indent=1) if arguments.json else around)


def versions() -> dict[str, str]:
    """Of all that is compared, as far as it is here."""
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def show(result: dict[str, Any]) -> None:
    """A few lines for a person."""
    load = " to ".join(f"{each:.1f}" for each in result["load average"])
    print(
        f"{result['model']}, {result['parameters']} parameters, {result['rounds']} rounds, ", end=""
    )
    print(f"time {result['time']}, load {load}")
    print(f"{'':34}{'ms':>8}   over lockstep        over a loop by hand")
    for side, (milliseconds, _, _) in result["milliseconds"].items():
        ratios = [
            "{:6.2f} [{:.2f}, {:.2f}]".format(*result[over][side])
            for over in ("over lockstep", "over a loop by hand on its backend")
        ]
        print(f"  {side:32}{milliseconds:8.3f}   {ratios[0]:20} {ratios[1]}")
    for side, why in result["left out"].items():
        print(f"  {side}: left out ({why})")
    print("", flush=True)


Ratios = dict[str, dict[str, list[float]]]
"""By model and side: median and quartiles of its time over that of lockstep."""


def ratios_on(page: str) -> Ratios:
    """Return the ratios of the first table of the page that has the sides of this benchmark."""
    table = page.split("python benchmarks/peers.py\n")[1].split("\n\n|")[1].split("\n\n")[0]
    head, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
    )
    models = [name.split(",")[0] for name in head[1:]]
    found: Ratios = {name: {} for name in models}
    for side, *cells in lines:
        for name, cell in zip(models, cells, strict=True):
            numbers = [float(each) for each in re.findall(r"\d+\.\d+", cell)]
            if len(numbers) == 3:
                found[name][side] = numbers
    return found


def draw(ratios: Ratios, path: Path = PICTURE) -> None:
    """Draw each side's time over that of lockstep, with quartiles, on a log scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sides = [side for side in next(iter(ratios.values())) if side != OURS]
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, (model, marker) in enumerate(zip(ratios, "os^", strict=False)):
        rows = [row + 0.22 * (number - 1) for row in range(len(sides))]
        medians = [ratios[model][side][0] for side in sides]
        below = [ratios[model][side][0] - ratios[model][side][1] for side in sides]
        above = [ratios[model][side][2] - ratios[model][side][0] for side in sides]
        axes.errorbar(
            medians, rows, xerr=[below, above], fmt=marker, markersize=5, capsize=2, label=model
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    ticks = [0.5, 0.7, 1, 1.5, 2, 3, 5, 10]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(sides)), sides)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(
        "CPU time of a step over that of lockstep on JAX (right of 1: lockstep costs less)"
    )
    axes.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
