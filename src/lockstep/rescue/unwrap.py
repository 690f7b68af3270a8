"""Find the template inside a parallel model.

A model from `multi_gpu_model` or similar code slices its inputs along the batch. It calls
one inner model once per device, and concatenates every output along the batch. The inner
model is the template; the file holds its config and all its weights. Slices are recognised
by their position in the graph and are never executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_MODELS = ("Model", "Functional", "Sequential", "Network", "Container")


@dataclass(frozen=True)
class Template:
    """The single model inside a parallel file."""

    name: str
    config: dict[str, Any]
    devices: int
    merges: tuple[str, ...]


def is_model(entry: dict[str, Any]) -> bool:
    """Return whether a layer of a config is itself a model."""
    config = entry.get("config")
    if entry.get("class_name") in _MODELS:
        return True
    return isinstance(config, dict) and {"layers", "input_layers", "output_layers"} <= set(config)


def entry_name(entry: dict[str, Any]) -> str:
    """Return the name of a layer in a config; its place depends on the Keras version."""
    config = entry.get("config")
    return str(entry.get("name") or (config.get("name") if isinstance(config, dict) else None))


def entries(config: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a config: models, layers, and what is inside them."""
    stack = [config]
    while stack:
        here = stack.pop()
        if isinstance(here, list):
            stack += here
        elif isinstance(here, dict):
            yield here
            stack += [value for key, value in here.items() if key != "inbound_nodes"]


def shape_of(config: dict[str, Any]) -> Any:
    """Return the shape of the input in the config of a layer, or None."""
    return config.get("batch_input_shape", config.get("batch_shape"))


def is_reference(value: Any) -> bool:
    """Return whether a value of a config is a tensor: `[layer, node, tensor]`, and keywords."""
    return (
        isinstance(value, list)
        and len(value) in (3, 4)
        and isinstance(value[0], str)
        and type(value[1]) is int
        and type(value[2]) is int
    )


def references(listed: Any) -> list[list[Any]]:
    """Return references `[layer, node, tensor]` in any nesting as a flat list."""
    if is_reference(listed):
        return [listed]
    values = listed.values() if isinstance(listed, dict) else listed
    return [ref for value in values for ref in references(value)]


def in_config(model: dict[str, Any] | None) -> Template | None:
    """Return the template in the config of a parallel model, or None for any other model.

    Only batch slices and batch concatenations are dropped. A model with any other layer
    around the inner model is not parallel.
    """
    try:
        return _in_config(model)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError):
        return None  # not a well-formed functional model


def template_config(model: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the template's config if the model is parallel, and the same config otherwise."""
    inside = in_config(model)
    return inside.config if inside else model


def _in_config(model: dict[str, Any] | None) -> Template | None:
    if not model or model.get("class_name") == "Sequential":
        return None
    graph = model["config"]
    layers = {entry_name(entry): entry for entry in graph["layers"]}
    merges = [layers[ref[0]] for ref in references(graph["output_layers"])]
    if not merges or not all(_joins_batches(entry) for entry in merges):
        return None
    joined = [_calls(entry)[0] for entry in merges]
    inner_names = {ref[0] for refs in joined for ref in refs}
    if len(inner_names) != 1:
        return None
    inner = layers[inner_names.pop()]
    if not is_model(inner):
        return None
    for position, refs in enumerate(joined):
        if [ref[2] for ref in refs] != [position] * len(refs):
            return None
        if [ref[1] for ref in refs] != [ref[1] for ref in joined[0]]:
            return None
    devices = len(joined[0])
    calls = _calls(inner)
    if len(calls) != devices or len({ref[1] for ref in joined[0]}) != devices:
        return None
    inputs = [ref[0] for ref in references(graph["input_layers"])]
    slices: set[str] = set()
    origins = [[_origin(layers[ref[0]], layers, slices) for ref in call] for call in calls]
    if any(origin != origins[0] for origin in origins):
        return None
    if sorted(map(str, origins[0])) != sorted(inputs):
        return None
    accounted = {*inputs, *slices, entry_name(inner), *(entry_name(entry) for entry in merges)}
    if accounted != set(layers) or len(slices) != devices * len(inputs):
        return None
    if not _are_numbered([layers[name] for name in slices], devices):
        return None
    return Template(
        name=entry_name(inner),
        config={"class_name": inner["class_name"], "config": inner["config"]},
        devices=devices,
        merges=tuple(entry_name(entry) for entry in merges),
    )


def _calls(entry: dict[str, Any]) -> list[list[list[Any]]]:
    return [references(call) for call in entry["inbound_nodes"]]


def _joins_batches(entry: dict[str, Any]) -> bool:
    config = entry["config"]
    concatenates = entry["class_name"] == "Concatenate" and config.get("axis") == 0
    merges = entry["class_name"] == "Merge" and (
        config.get("mode") == "concat" and config.get("concat_axis") == 0
    )
    return (concatenates or merges) and len(entry["inbound_nodes"]) == 1


def _origin(entry: dict[str, Any], layers: dict[str, Any], slices: set[str]) -> str | None:
    """Add a layer to `slices` and return the input that it slices, or None for no slice."""
    if entry["class_name"] == "InputLayer" or is_model(entry):
        return None
    calls = _calls(entry)
    if len(calls) != 1 or len(calls[0]) != 1:
        return None
    source = layers[calls[0][0][0]]
    slices.add(entry_name(entry))
    return entry_name(source) if source["class_name"] == "InputLayer" else None


def _are_numbered(slices: list[dict[str, Any]], devices: int) -> bool:
    """Return whether the settings or the names of the slices number the devices.

    Other layers, such as one that flips its input, may stand in the place of slices.
    """
    parts: list[int] = []
    for entry in slices:
        settings = dict(entry["config"])
        settings.update(settings.pop("arguments", None) or {})
        numbers = {k: v for k, v in settings.items() if type(v) is int}
        index = [v for k, v in numbers.items() if v < devices and k not in ("parts", "dtype")]
        if devices not in numbers.values() or not index:
            break
        parts.append(index[0])
    if len(parts) == len(slices) and len(set(parts)) == devices:
        return True
    marks = [re.search(r"Dev(\d+)$", entry_name(entry)) for entry in slices]
    return all(marks) and {int(mark[1]) for mark in marks if mark} == set(range(devices))
