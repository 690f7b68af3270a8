"""The tasks of the demo: handwritten digits, and a language model of Python's own source text."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRAINING_ROWS = 1500
"""Rows to train on, in either task."""

# The networks are smooth. Where a ReLU or a max pooling meets a value that rounding can
# push over its kink, two runs part by far more than rounding, on one device as well.


@dataclass(frozen=True)
class Task:
    """What the demo trains.

    Attributes:
        name: What it is called in the table, and, in lower case, the file.
        rows: What a row of the data is.
        training: Inputs and targets to train on.
        held_out: Inputs and targets to evaluate on.
        score: What is compared on these: `"accuracy"`, or `"loss"`.
        build: Makes the compiled model, always the same one; it is given a function to call
            between construction and compilation.
    """

    name: str
    rows: str
    training: tuple[Any, Any]
    held_out: tuple[Any, Any]
    score: str
    build: Callable[[Callable[[Any], Any]], Any]


def tasks() -> tuple[Task, ...]:
    """The tasks, in the order of the demo."""
    return digits(), python_source()


def digits() -> Task:
    """Scikit-learn's images of handwritten digits."""
    import numpy as np
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], labels[order].astype("int32")
    return Task(
        "Digits",
        "images of digits",
        (x[:TRAINING_ROWS], y[:TRAINING_ROWS]),
        (x[TRAINING_ROWS:], y[TRAINING_ROWS:]),
        "accuracy",
        _classifier,
    )


def _classifier(place: Callable[[Any], Any]) -> Any:
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
    place(model)
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
LENGTH = 64
"""Characters of a row of text."""

_READ = ("argparse", "functools", "difflib", "dataclasses", "heapq", "csv", "json.decoder")
_HELD_OUT = ("textwrap",)


def python_source() -> Task:
    """Modules of Python's standard library, as text: each character is followed by the next."""
    return Task(
        "Python",
        f"texts of {LENGTH} characters",
        _windows(_READ, TRAINING_ROWS),
        _windows(_HELD_OUT, 200),
        "loss",
        _language_model,
    )


def _windows(modules: tuple[str, ...], count: int) -> tuple[Any, Any]:
    import numpy as np

    specs = [importlib.util.find_spec(name) for name in modules]
    files = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    text = "".join(Path(file).read_text(encoding="utf-8") for file in files)
    codes = np.array([CHARACTERS.index(c) for c in text if c in CHARACTERS], "int32")
    starts = np.random.default_rng(0).choice(len(codes) - LENGTH - 1, count, replace=False)
    rows = np.stack([codes[start : start + LENGTH + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def _language_model(place: Callable[[Any], Any]) -> Any:
    import keras
    from keras import layers

    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    characters = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(len(CHARACTERS), 64)(characters)
    for dilation in (1, 2, 4, 8):  # so that a character is predicted from the 31 before it
        convolved = layers.Conv1D(
            64, 3, padding="causal", dilation_rate=dilation, activation="gelu"
        )(hidden)
        hidden = layers.LayerNormalization()(hidden + convolved)
    model = keras.Model(characters, layers.Dense(len(CHARACTERS))(hidden), name="python")
    place(model)
    model.compile(
        keras.optimizers.Adam(0.004),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
