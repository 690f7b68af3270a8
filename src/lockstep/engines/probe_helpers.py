"""Helpers of the probes of all backends."""

import itertools
import time
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from lockstep.errors import UnusableData
from lockstep.keras_compat import build_from_batch, pythonify_logs
from lockstep.state import unique

SHORT_FLOATS = ("bfloat16", "float16", "float32")
"""Float types that are shorter than float64, by the digits that they keep."""


def shortest(types: Iterable[str]) -> str | None:
    """Return the shortest of some float types, `None` for none."""
    return min(types, key=SHORT_FLOATS.index, default=None)


def watched_layers(model: Any) -> list[Any]:
    """Return the layers of a model and of nested models, each once."""
    found: list[Any] = []
    for layer in model.layers:
        found += watched_layers(layer) if isinstance(layer, keras.Model) else [layer]
    return unique(found)


def part_of(seen: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries of `seen` under `prefix/` as float64, sorted by name."""
    found = {name: value for name, value in seen.items() if name.startswith(prefix)}
    return {
        name.removeprefix(f"{prefix}/"): np.asarray(value, "float64")
        for name, value in sorted(found.items())
    }


def draw(batches: Any, most: int) -> tuple[float, int]:
    """Draw the batches of one epoch, and return the seconds and the number of batches.

    Args:
        batches: Keras's iterator over the epochs.
        most: The maximum number of batches.
    """
    try:
        _, _, iterator = next(iter(batches))
        number = batches.num_batches or most
        if number > most:  # the start of an epoch serves all its batches
            next(iterator)
        start = time.perf_counter()
        # Stop where a fit stops: after the last batch, the iterator waits for workers.
        count = sum(1 for _ in itertools.islice(iterator, min(most, number)))
        return time.perf_counter() - start, count
    finally:
        batches.reset()  # ends the workers of a data set


def tensors(batch: Any) -> Any:
    """Return a batch of host arrays as tensors of the backend."""
    return keras.tree.map_structure(
        lambda leaf: leaf if leaf is None else keras.ops.convert_to_tensor(leaf), batch
    )


def trained_once(model: Any, batch: Any) -> dict[str, Any]:
    """Train one step on a batch in the structure of `fit`, and return the logs."""
    # keras/src/backend/*/trainer.py, train_on_batch
    model.make_train_function()
    model.reset_metrics()
    logs = pythonify_logs(model.train_function([tensors(batch)]))
    return {name: np.asarray(value) for name, value in logs.items()}


def build_symbolically(model: Any, batch: Any) -> None:
    """Build a model, its metrics and its optimizer from a batch, without a computation.

    Raises:
        UnusableData: If Keras cannot build the model from the batch.
    """
    try:
        build_from_batch(model, batch)
    except RuntimeError as error:
        raise not_built(model, error) from error


def not_built(model: Any, error: Exception) -> UnusableData:
    """Return the error for a model that Keras cannot build from a batch."""
    reason = str(error).strip().splitlines()[-1][:160]
    return UnusableData(
        f"{model.name!r} is not built, and Keras cannot build it from a batch: {reason}\n"
        "Build it as its own code does, by one short call of its fit for example, and verify it "
        "then."
    )
