"""Helpers of the probes of all backends."""

from typing import Any

import keras
import numpy as np

from lockstep.errors import UnusableData


def watched_layers(model: Any) -> list[Any]:
    """Return the layers of a model and of nested models, each once."""
    found: list[Any] = []
    for layer in model.layers:
        found += watched_layers(layer) if isinstance(layer, keras.Model) else [layer]
    return list({id(layer): layer for layer in found}.values())


def part_of(seen: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries of `seen` under `prefix/` as float64, sorted by name."""
    found = {name: value for name, value in seen.items() if name.startswith(prefix)}
    return {
        name.removeprefix(f"{prefix}/"): np.asarray(value, "float64")
        for name, value in sorted(found.items())
    }


def not_built(model: Any, error: Exception) -> UnusableData:
    """Return the error for a model that Keras cannot build from a batch."""
    reason = str(error).strip().splitlines()[-1][:160]
    return UnusableData(
        f"{model.name!r} is not built, and Keras cannot build it from a batch: {reason}\n"
        "Build it as its own code does, by one short call of its fit for example, and verify it "
        "then."
    )
