"""The main job on real data: two tasks, each trained on one device and on several."""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.devices import shard_rows
from lockstep.distribute import distribute
from lockstep.errors import UnsupportedBackend
from lockstep.rehearsal import rehearse
from lockstep.tools.demo_picture import draw_demo
from lockstep.tools.demo_tasks import TRAINING_ROWS, Task, tasks
from lockstep.tools.progress import Advance, progress

BATCH = 53
"""A prime, so that it divides over no number of devices."""

BOUND = 1e-5
"""How far apart losses and weights may be: float32, sums in another order."""

_PLAIN_KERAS = """
import json, sys
import jax, keras, numpy as np
scores = []
for data, model, score in json.loads(sys.argv[1]):
    held_out = np.load(data)
    model = keras.models.load_model(model)
    scores.append(model.evaluate(held_out["x"], held_out["y"], verbose=0, return_dict=True)[score])
print(json.dumps({
    "scores": scores,
    "devices": jax.device_count(),
    "lockstep_imported": "lockstep" in sys.modules,
}))
"""


@dataclass(frozen=True)
class TaskResult:
    """What the demo found in one task.

    Attributes:
        name: What the task is called.
        score: What was measured on held-out data: `"accuracy"`, or `"loss"`.
        losses: Training loss after each step, as `fit` reports it: one device, several devices.
        scores: The score: one device, several devices.
        weight_difference: The largest absolute difference of any weight.
        same_files: Whether both files have the same configuration and variables.
        plain_score: What plain Keras measures on the saved file.
    """

    name: str
    score: str
    losses: tuple[list[float], list[float]]
    scores: tuple[float, float]
    weight_difference: float
    same_files: bool
    plain_score: float

    @property
    def apart(self) -> list[float]:
        """How far the losses of both runs are apart, after each step."""
        return [abs(one - many) for one, many in zip(*self.losses, strict=True)]

    @property
    def holds(self) -> bool:
        """Whether several devices gave what one device gave."""
        within = 0.0 if self.score == "accuracy" else BOUND
        one, many = self.scores
        return (
            max(self.apart) <= BOUND
            and self.weight_difference <= BOUND
            and max(abs(one - many), abs(many - self.plain_score)) <= within
            and self.same_files
        )


@dataclass(frozen=True)
class DemoResult:
    """What the demo found.

    Attributes:
        devices: The number of devices of the second runs.
        tasks: One result for each task.
        folder: Where the files are.
    """

    devices: int
    tasks: tuple[TaskResult, ...]
    folder: Path

    @property
    def holds(self) -> bool:
        """Whether several devices gave what one device gave, in every task."""
        return all(task.holds for task in self.tasks)

    def sentence(self) -> str:
        """What was found, in one sentence."""
        if not self.holds:
            return "The runs differ. Please report this, with the table below."
        steps = sum(len(task.apart) for task in self.tasks)
        losses = max(max(task.apart) for task in self.tasks)
        weights = max(task.weight_difference for task in self.tasks)
        return (
            f"{self.devices} devices gave the same results as one device: the losses of all "
            f"{steps} training steps differ by at most {losses:.1e}, and the final weights by "
            f"at most {weights:.1e}. The bound is {BOUND:.0e}."
        )

    def table(self) -> list[tuple[str, str, str, str]]:
        """The rows of the table: what it is, one device, several devices, how far apart."""
        rows = []
        for task in self.tasks:
            for what, (one, many) in (
                ("training loss", (task.losses[0][-1], task.losses[1][-1])),
                (f"held-out {task.score}", task.scores),
            ):
                apart = f"{abs(one - many):.1e}"
                rows.append((f"{task.name}: {what}", f"{one:.7f}", f"{many:.7f}", apart))
            apart = f"{task.weight_difference:.1e}"
            rows.append((f"{task.name}: weights, at most", "", "", apart))
            same = "same structure" if task.same_files else "they differ"
            rows.append((f"{task.name}: file, by plain Keras", "", f"{task.plain_score:.7f}", same))
        return rows


def run_demo(devices: int, epochs: int, folder: Path) -> DemoResult:
    """Train two small networks twice each, and compare.

    Args:
        devices: Virtual devices for the second run, at least 1.
        epochs: Passes over the training data, at least 1.
        folder: Where the models and `demo.png` go; it is there.

    Returns:
        The comparison.

    Raises:
        UnsupportedBackend: If Keras runs on another backend than JAX.
    """
    import keras

    if keras.backend.backend() != "jax":
        raise UnsupportedBackend(
            f"The demo needs JAX, but Keras runs on {keras.backend.backend()!r}.\nRun it as "
            "KERAS_BACKEND=jax lockstep demo; `lockstep verify` compares your own model."
        )
    rehearse(devices)
    both = tasks()
    print(_about_batches(devices), flush=True)
    with progress(2 * len(both) * epochs * -(-TRAINING_ROWS // BATCH), lines=True) as advance:
        runs = [
            [_train(task, epochs, count, advance) for count in (None, devices)] for task in both
        ]
        advance("The files, loaded by plain Keras in a separate process", 0)
        files = [folder / f"{task.name.lower()}.keras" for task in both]
        for file, (_, (many, _)) in zip(files, runs, strict=True):
            many.save(file)
        plain = _scores_by_plain_keras(both, files)
        result = DemoResult(
            devices,
            tuple(
                _compared(task, file, one, many, score)
                for task, file, (one, many), score in zip(both, files, runs, plain, strict=True)
            ),
            folder,
        )
        advance("The picture", 0)
        images, labels = (part[:24] for part in both[0].held_out)
        guesses = runs[0][1][0].predict(images, verbose=0).argmax(axis=-1)
        apart = {task.name: task.apart for task in result.tasks}
        draw_demo(folder / "demo.png", apart, BOUND, images, labels, guesses)
    return result


def _about_batches(devices: int) -> str:
    """How a batch is split, in a line."""
    rows = [len(shard) for shard in shard_rows(BATCH, devices)]
    parts = " + ".join(map(str, rows)) if devices <= 8 else f"parts of at most {rows[0]}"
    last = TRAINING_ROWS % BATCH
    return (
        f"Each task: {TRAINING_ROWS:,} rows in batches of {BATCH}, a prime; "
        f"on {devices} devices {parts}, and {last} rows in the last batch."
    )


def _train(
    task: Task, epochs: int, devices: int | None, advance: Advance
) -> tuple[Any, list[float]]:
    import keras

    run = f"{task.name} on {'one device' if devices is None else f'{devices} devices'}"
    losses: list[float] = []

    def stepped(step: int, logs: dict[str, float]) -> None:
        losses.append(float(logs["loss"]))
        advance(run, 1)

    advance(run, 0)
    model = task.build(lambda made: made if devices is None else distribute(made, devices))
    model.fit(
        *task.training,
        batch_size=BATCH,
        epochs=epochs,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stepped)],
    )
    return model, losses


def _compared(task: Task, file: Path, one: Any, many: Any, plain_score: float) -> TaskResult:
    (alone, alone_losses), (spread, spread_losses) = one, many
    scores = [
        float(model.evaluate(*task.held_out, verbose=0, return_dict=True)[task.score])
        for model in (alone, spread)
    ]
    return TaskResult(
        name=task.name,
        score=task.score,
        losses=(alone_losses, spread_losses),
        scores=(scores[0], scores[1]),
        weight_difference=_largest_difference(alone, spread),
        same_files=_contents_saved(alone) == _contents(file),
        plain_score=plain_score,
    )


def _largest_difference(one: Any, many: Any) -> float:
    import numpy as np

    pairs = zip(one.get_weights(), many.get_weights(), strict=True)
    return max(float(np.max(np.abs(mine - theirs))) for mine, theirs in pairs)


def _contents_saved(model: Any) -> tuple[Any, list[str]]:
    with tempfile.TemporaryDirectory(prefix="lockstep-demo-") as folder:
        file = Path(folder) / "one-device.keras"
        model.save(file)
        return _contents(file)


def _contents(file: Path) -> tuple[Any, list[str]]:
    import h5py

    paths: list[str] = []
    with zipfile.ZipFile(file) as archive:
        config = json.loads(archive.read("config.json"), object_hook=_without_address)
        with archive.open("model.weights.h5") as opened, h5py.File(opened) as weights:
            weights.visit(paths.append)
    return config, paths


def _without_address(config: dict[str, Any]) -> dict[str, Any]:
    # The id of a shared object is its address in memory, which differs in every run.
    return {key: value for key, value in config.items() if key != "shared_object_id"}


def _scores_by_plain_keras(both: tuple[Task, ...], files: list[Path]) -> list[float]:
    import numpy as np

    # XLA_FLAGS may ask for more CPU devices, too.
    several = ("LOCKSTEP", "JAX_NUM", "XLA_FLAGS")
    plain = {k: v for k, v in os.environ.items() if not k.startswith(several)}
    with tempfile.TemporaryDirectory(prefix="lockstep-demo-") as folder:
        asked = []
        for task, file in zip(both, files, strict=True):
            data = Path(folder) / f"{task.name}.npz"
            np.savez(data, x=task.held_out[0], y=task.held_out[1])
            asked.append((str(data), str(file), task.score))
        done = subprocess.run(
            [sys.executable, "-c", _PLAIN_KERAS, json.dumps(asked)],
            env={**plain, "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found = json.loads(done.stdout.splitlines()[-1])
    if found["devices"] != 1 or found["lockstep_imported"]:
        raise RuntimeError(f"The check ran with lockstep or on several devices: {found}")
    return [float(score) for score in found["scores"]]
