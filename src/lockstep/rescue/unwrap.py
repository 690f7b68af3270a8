"""Find the template inside a parallel model.

A model from `multi_gpu_model` or similar code slices its inputs along the batch. It calls
one inner model once per device, and concatenates every output along the batch. The inner
model is the template; the file holds its config and all its weights. Slices are recognised
by their position in the graph and are never executed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from lockstep.rescue.keras2 import OldFile

_MODELS = ("Model", "Functional", "Sequential", "Network", "Container")


@dataclass(frozen=True)
class Template:
    """The single model inside a parallel file."""

    name: str
    config: dict[str, Any]
    devices: int
    merges: tuple[str, ...]
    evidence: str


def is_model(entry: dict[str, Any]) -> bool:
    """Return whether a layer of a config is itself a model."""
    config = entry.get("config")
    if entry.get("class_name") in _MODELS:
        return True
    return isinstance(config, dict) and {"layers", "input_layers", "output_layers"} <= set(config)


def in_config(model: dict[str, Any] | None) -> Template | None:
    """Return the template in the config of a parallel model, or None for any other model.

    Only batch slices and batch concatenations are dropped. A model with any other layer
    around the inner model is not parallel.
    """
    try:
        return _in_config(model)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None  # not a well-formed functional model


def in_groups(old: OldFile) -> tuple[str, int | None] | None:
    """Return the inner group's name and the number of devices, from a file of weights.

    One group has all the weights; the groups of inputs, slices and merges are empty. A
    single model whose only layer with weights is a nested model can look the same. Such
    a file is read the same way.
    """
    if len(old.weighted) != 1 or len(old.groups) < 4:
        return None
    inner = old.weighted[0]
    position = [group.name for group in old.groups].index(inner.name)
    before = [group.name for group in old.groups[:position]]
    slices = [name for name in before if _slice_name(name)]
    inputs = len(before) - len(slices)
    if not inputs or len(slices) < 2 or position == len(old.groups) - 1:
        return None
    if any("/" not in weight.name for weight in inner.weights):
        return None
    return inner.name, len(slices) // inputs if len(slices) % inputs == 0 else None


def _slice_name(name: str) -> bool:
    return bool(re.search(r"lambda|slice", name, re.IGNORECASE))


def _in_config(model: dict[str, Any] | None) -> Template | None:
    if not model or model.get("class_name") == "Sequential":
        return None
    graph = model["config"]
    layers = {_name(entry): entry for entry in graph["layers"]}
    merges = [layers[ref[0]] for ref in _references(graph["output_layers"])]
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
    inputs = [ref[0] for ref in _references(graph["input_layers"])]
    slices: set[str] = set()
    origins = [[_origin(layers[ref[0]], layers, slices) for ref in call] for call in calls]
    if any(origin != origins[0] for origin in origins) or sorted(map(str, origins[0])) != sorted(
        inputs
    ):
        return None
    accounted = {*inputs, *slices, _name(inner), *(_name(entry) for entry in merges)}
    if accounted != set(layers) or len(slices) != devices * len(inputs):
        return None
    evidence = _evidence([layers[name] for name in slices], devices)
    if evidence is None:
        if not _same_inputs(inner, [layers[str(name)] for name in origins[0]]):
            return None
        evidence = "the layers around the inner model only split and join the batch"
    return Template(
        name=_name(inner),
        config={"class_name": inner["class_name"], "config": inner["config"]},
        devices=devices,
        merges=tuple(_name(entry) for entry in merges),
        evidence=evidence,
    )


def _name(entry: dict[str, Any]) -> str:
    return str(entry.get("name") or entry["config"]["name"])


def _references(listed: Any) -> list[list[Any]]:
    return [listed] if listed and isinstance(listed[0], str) else list(listed)


def _calls(entry: dict[str, Any]) -> list[list[list[Any]]]:
    return [_references(call) for call in entry["inbound_nodes"]]


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
    slices.add(_name(entry))
    return _name(source) if source["class_name"] == "InputLayer" else None


def _evidence(slices: list[dict[str, Any]], devices: int) -> str | None:
    """Describe how the slices number their parts, or return None where they do not."""
    parts: dict[int, int] = {}
    for entry in slices:
        settings = dict(entry["config"])
        settings.update(settings.pop("arguments", None) or {})
        numbers = {k: v for k, v in settings.items() if type(v) is int}
        if devices not in numbers.values():
            break
        index = [v for k, v in numbers.items() if v < devices and k not in ("parts", "dtype")]
        if not index:
            break
        parts[index[0]] = parts.get(index[0], 0) + 1
    else:
        if len(parts) == devices:
            return f"slices 0 to {devices - 1} of {devices}"
    marks = [re.search(r"Dev(\d+)$", _name(entry)) for entry in slices]
    if all(marks) and {int(mark.group(1)) for mark in marks if mark} == set(range(devices)):
        return f"slices named for devices 0 to {devices - 1}"
    return None


def _same_inputs(inner: dict[str, Any], outer: list[dict[str, Any]]) -> bool:
    """Return whether the inner and the outer model have inputs of equal shapes."""
    config = inner["config"]
    entries = config if isinstance(config, list) else config["layers"]
    if isinstance(config, dict) and "input_layers" in config:
        named = {_name(entry): entry for entry in entries}
        taken = [named[ref[0]] for ref in _references(config["input_layers"])]
    else:
        taken = [entries[0]]
    shapes = [_shape(entry) for entry in taken]
    return None not in shapes and shapes == [_shape(entry) for entry in outer]


def _shape(entry: dict[str, Any]) -> Any:
    config = entry["config"]
    return config.get("batch_input_shape", config.get("batch_shape"))
