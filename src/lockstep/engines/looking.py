"""What a probe looks at, whatever the backend."""

from typing import Any

import keras
import numpy as np


def watched_layers(model: Any) -> list[Any]:
    """The layers of a model and of models inside it, each once."""
    found: list[Any] = []
    for layer in model.layers:
        found += watched_layers(layer) if isinstance(layer, keras.Model) else [layer]
    return list({id(layer): layer for layer in found}.values())


def part_of(seen: dict[str, Any], prefix: str) -> dict[str, Any]:
    """What was seen under `prefix/`, in the order of its names, as float64."""
    found = {name: value for name, value in seen.items() if name.startswith(prefix)}
    return {
        name.removeprefix(f"{prefix}/"): np.asarray(value, "float64")
        for name, value in sorted(found.items())
    }
