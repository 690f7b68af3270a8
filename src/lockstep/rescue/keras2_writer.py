"""Writing the Keras 2 layout, for people who stay there.

The config is the old one, untouched; the weights lie in one group per layer, under
their old names, as `template.save()` or `template.save_weights()` would have written.
"""

from __future__ import annotations

import json
from typing import Any

from lockstep.rescue import hdf5, stream
from lockstep.rescue.keras2 import OldFile, Stored
from lockstep.rescue.leaves import Branch, Leaf
from lockstep.rescue.match import Pair, halves
from lockstep.rescue.modern import require_equal
from lockstep.rescue.report import Row
from lockstep.rescue.template import Target


def write(old: OldFile, target: Target, path: str) -> tuple[list[Row], str]:
    """Write a Keras 2 file of the template and read every array of it back."""
    import h5py

    with h5py.File(path, "w") as handle:
        root = handle
        if target.config is not None:
            root = handle.create_group("model_weights")
            handle.attrs["model_config"] = json.dumps(target.config).encode()
            for place in (handle, root):
                place.attrs["backend"] = (old.backend or "tensorflow").encode()
                place.attrs["keras_version"] = (old.version or "2.2.4").encode()
        else:
            root.attrs["backend"] = (old.backend or "tensorflow").encode()
            root.attrs["keras_version"] = (old.version or "2.2.4").encode()
        places = _write_layers(target, root)
        optimizer = _write_training(old, target, handle)
    with h5py.File(path, "r") as handle:
        rows = [
            Row(
                pair.stored.path.lstrip("/"),
                place,
                pair.stored.shape,
                stream.equal(pair.stored, None, handle[place]),
            )
            for place, pair in places.items()
        ]
    require_equal(rows)
    return rows, optimizer


def _write_layers(target: Target, root: Any) -> dict[str, Pair]:
    pairs = target.by_index()
    tops = {child.name: child for child in target.tree.children}
    names = _layer_names(target, tops)
    hdf5.write_names(root, "layer_names", names)
    places: dict[str, Pair] = {}
    for name in names:
        group = root.require_group(name)
        listed: list[str] = []
        if name in tops:
            for pair in _in_file_order(tops[name], pairs):
                own = _unique(pair.stored.name, listed)
                listed.append(own)
                stream.copy(pair.stored, None, group, own)
                places[f"{group.name}/{own}".lstrip("/")] = pair
        hdf5.write_names(group, "weight_names", listed)
    return places


def _in_file_order(node: Leaf | Branch, pairs: dict[int, Pair]) -> list[Pair]:
    head, tail = halves(node, set())
    return [pairs[slot.index] for _, slot in head + tail]


def _layer_names(target: Target, tops: dict[str, Leaf | Branch]) -> list[str]:
    config = target.config["config"] if target.config else None
    entries = config["layers"] if isinstance(config, dict) else config
    if not entries:
        return list(tops)
    from lockstep.rescue import graph

    return [str(entry.get("name") or graph.entry_name(entry)) for entry in entries]


def _write_training(old: OldFile, target: Target, handle: Any) -> str:
    if target.config is None or old.training is None or old.config is None:
        return "dropped" if old.optimizer else "none"
    settings = dict(old.training)
    merges = list(target.template.merges) if target.template else []
    for key in ("loss", "metrics", "loss_weights", "weighted_metrics"):
        value = settings.get(key)
        if isinstance(value, dict) and merges and set(value) <= set(merges):
            renamed = dict(zip(merges, target.outputs, strict=True))
            settings[key] = {renamed[name]: entry for name, entry in value.items()}
    handle.attrs["training_config"] = json.dumps(settings).encode()
    if not old.optimizer:
        return "none"
    group = handle.create_group("optimizer_weights")
    listed: list[str] = []
    for stored in old.optimizer:
        own = _unique(stored.name, listed)
        listed.append(own)
        stream.copy(stored, None, group, own)
    hdf5.write_names(group, "weight_names", listed)
    return "carried"


def _unique(name: str, taken: list[str]) -> str:
    """Names of nested layers may repeat; in one group they may not."""
    if name not in taken:
        return name
    stem, _, last = name.rpartition("/")
    number = 1
    while f"{stem}_{number}/{last}" in taken:
        number += 1
    return f"{stem}_{number}/{last}"


def arrays_by_layer(found: dict[str, Stored], old: OldFile, path: str) -> list[Row]:
    """Write weights without an architecture: one group per layer name, in file order."""
    import h5py

    layers: dict[str, list[tuple[str, Stored]]] = {}
    for stored in found.values():
        layer = stored.name.rpartition("/")[0] or "weights"
        layers.setdefault(layer, []).append((stored.name, stored))
    with h5py.File(path, "w") as handle:
        handle.attrs["backend"] = (old.backend or "tensorflow").encode()
        handle.attrs["keras_version"] = (old.version or "2.2.4").encode()
        hdf5.write_names(handle, "layer_names", list(layers))
        for layer, entries in layers.items():
            group = handle.require_group(layer)
            hdf5.write_names(group, "weight_names", [name for name, _ in entries])
            for name, stored in entries:
                stream.copy(stored, None, group, name)
    with h5py.File(path, "r") as handle:
        rows = []
        for layer, entries in layers.items():
            for name, stored in entries:
                same = stream.equal(stored, None, handle[f"{layer}/{name}"])
                rows.append(Row(stored.path.lstrip("/"), f"{layer}/{name}", stored.shape, same))
    require_equal(rows)
    return rows
