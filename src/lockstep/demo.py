"""The main job on real data: digits, trained on one device and on several."""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.distribute import distribute
from lockstep.errors import UnsupportedBackend
from lockstep.rehearsal import rehearse

BATCH = 53
"""A prime, so that it divides over no number of devices."""

TRAINING_ROWS = 1500

# The network is smooth. Where a ReLU or a max pooling meets a value that rounding can
# push over its kink, two runs part by far more than rounding, on one device as well.

_PLAIN_KERAS = """
import json, sys
import jax, keras, numpy as np
held_out = np.load(sys.argv[1])
model = keras.models.load_model(sys.argv[2])
accuracy = model.evaluate(held_out["x"], held_out["y"], verbose=0, return_dict=True)["accuracy"]
print(json.dumps({
    "accuracy": accuracy,
    "devices": jax.device_count(),
    "lockstep_imported": "lockstep" in sys.modules,
}))
"""


@dataclass(frozen=True)
class DemoResult:
    """What the demo found.

    Attributes:
        losses: Training loss of the last epoch: one device, several devices.
        accuracies: Accuracy on held-out digits: one device, several devices.
        weight_difference: The largest absolute difference of any weight.
        same_files: Whether both files have the same configuration and variables.
        plain_accuracy: What plain Keras measures on the saved file.
        folder: Where the files are.
    """

    losses: tuple[float, float]
    accuracies: tuple[float, float]
    weight_difference: float
    same_files: bool
    plain_accuracy: float
    folder: Path

    @property
    def holds(self) -> bool:
        """Whether several devices gave what one device gave."""
        return (
            abs(self.losses[0] - self.losses[1]) <= 1e-5
            and self.weight_difference <= 1e-5
            and self.accuracies[0] == self.accuracies[1] == self.plain_accuracy
            and self.same_files
        )


def run_demo(devices: int, epochs: int, folder: Path) -> DemoResult:
    """Train a small network on handwritten digits twice, and compare.

    Args:
        devices: Virtual devices for the second run, at least 1.
        epochs: Passes over the 1,500 training digits, at least 1.
        folder: Where `digits.keras` and `digits.png` go; it is there.

    Returns:
        The comparison.

    Raises:
        UnsupportedBackend: If Keras runs on another backend than JAX.
    """
    import keras

    if keras.backend.backend() != "jax":
        raise UnsupportedBackend(
            f"The demo shows that dropout draws one device's numbers, as on JAX alone, and Keras "
            f"runs on {keras.backend.backend()!r}.\n"
            "Run it as KERAS_BACKEND=jax lockstep demo; `lockstep verify` compares your own model."
        )
    rehearse(devices)
    digits = _digits()
    _say("One device")
    one, one_history = _train(digits, epochs, None)
    _say(f"{devices} devices")
    many, many_history = _train(digits, epochs, devices)

    many.save(folder / "digits.keras")
    _, (x, y) = digits
    accuracies = [_accuracy(model, x, y) for model in (one, many)]
    result = DemoResult(
        losses=(one_history["loss"][-1], many_history["loss"][-1]),
        accuracies=(accuracies[0], accuracies[1]),
        weight_difference=_largest_difference(one, many),
        same_files=_contents_saved(one) == _contents(folder / "digits.keras"),
        plain_accuracy=_accuracy_by_plain_keras(folder / "digits.keras", x, y),
        folder=folder,
    )
    _draw(folder / "digits.png", devices, one_history, many_history, many, x, y)
    return result


def _digits() -> Any:
    import numpy as np
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], labels[order].astype("int32")
    return (x[:TRAINING_ROWS], y[:TRAINING_ROWS]), (x[TRAINING_ROWS:], y[TRAINING_ROWS:])


def _train(digits: Any, epochs: int, devices: int | None) -> tuple[Any, dict[str, list[float]]]:
    import keras
    from keras import layers

    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("gelu"),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("gelu"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10, activation="softmax"),
        ],
        name="digits",
    )
    if devices is not None:
        distribute(model, devices=devices)
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    training, held_out = digits
    history = model.fit(*training, batch_size=BATCH, epochs=epochs, validation_data=held_out)
    return model, history.history


def _accuracy(model: Any, x: Any, y: Any) -> float:
    return float(model.evaluate(x, y, verbose=0, return_dict=True)["accuracy"])


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
    # Keras writes where a shared object lay in memory, which differs in every run.
    return {key: value for key, value in config.items() if key != "shared_object_id"}


def _accuracy_by_plain_keras(model: Path, x: Any, y: Any) -> float:
    import numpy as np

    # XLA_FLAGS may ask for more CPU devices, too.
    several = ("LOCKSTEP", "JAX_NUM", "XLA_FLAGS")
    plain = {k: v for k, v in os.environ.items() if not k.startswith(several)}
    with tempfile.TemporaryDirectory(prefix="lockstep-demo-") as folder:
        held_out = Path(folder) / "held_out.npz"
        np.savez(held_out, x=x, y=y)
        done = subprocess.run(
            [sys.executable, "-c", _PLAIN_KERAS, str(held_out), str(model)],
            env={**plain, "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found = json.loads(done.stdout.splitlines()[-1])
    if found["devices"] != 1 or found["lockstep_imported"]:
        raise RuntimeError(f"The check by plain Keras was none: {found}")
    return float(found["accuracy"])


def _draw(
    path: Path,
    devices: int,
    one_history: dict[str, list[float]],
    many_history: dict[str, list[float]],
    model: Any,
    x: Any,
    y: Any,
) -> None:
    from lockstep.demo_picture import draw_digits

    losses = {"one device": one_history["loss"], f"{devices} devices": many_history["loss"]}
    guesses = model.predict(x[:24], verbose=0).argmax(axis=-1)
    draw_digits(path, losses, x[:24], y[:24], guesses)


def _say(title: str) -> None:
    # ASCII: what stdout goes to may know nothing else.
    print(f"\n-- {title} " + "-" * (60 - len(title)), flush=True)
