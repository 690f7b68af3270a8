"""Writing the Keras 2 layout, for people who stay there.

The config is the old one, untouched; the weights lie in one group per layer, under
their old names, as `template.save()` or `template.save_weights()` would have written.
"""

from __future__ import annotations

import json
from typing import Any

from lockstep.errors import UnsuitableOutput
from lockstep.rescue import hdf5, stream
from lockstep.rescue.keras2 import OldFile
from lockstep.rescue.leaves import Branch, Leaf
from lockstep.rescue.match import Pair, halves
from lockstep.rescue.modern import require_equal
from lockstep.rescue.report import Row
from lockstep.rescue.template import Target

Config = dict[str, Any] | None


def write(old: OldFile, target: Target, path: str) -> tuple[list[Row], str]:
    """Write a Keras 2 file of the template and read every array of it back."""
    import h5py

    # A live model is Keras 3's, which Keras 2 does not read, and its layers have names of
    # their own: the file's config would name others.
    config = None if target.live else target.config
    with h5py.File(path, "w") as handle:
        root = handle
        if config is not None:
            root = handle.create_group("model_weights")
            handle.attrs["model_config"] = json.dumps(config).encode()
            for place in (handle, root):
                place.attrs["backend"] = (old.backend or "tensorflow").encode()
                place.attrs["keras_version"] = (old.version or "2.2.4").encode()
        else:
            target.context.note("weights alone, under the names of the model that was given")
            root.attrs["backend"] = (old.backend or "tensorflow").encode()
            root.attrs["keras_version"] = (old.version or "2.2.4").encode()
        places = _write_layers(target, config, root)
        optimizer = _write_training(old, target, config, handle)
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


def _write_layers(target: Target, config: Config, root: Any) -> dict[str, Pair]:
    pairs = target.by_index()
    tops = {child.name: child for child in target.tree.children}
    names = _layer_names(config, tops)
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
    if len(places) != len(pairs):
        raise UnsuitableOutput(
            f"{len(pairs)} weights were to be written, and the config names layers for "
            f"{len(places)}.\nNothing was written: two layers share a name, or one is in no "
            "list. Write a .keras file."
        )
    return places


def _in_file_order(node: Leaf | Branch, pairs: dict[int, Pair]) -> list[Pair]:
    head, tail = halves(node, set())
    return [pairs[slot.index] for _, slot in head + tail]


def _layer_names(config: Config, tops: dict[str, Leaf | Branch]) -> list[str]:
    if config is None:
        return list(tops)
    inner = config["config"]
    entries = inner["layers"] if isinstance(inner, dict) else inner
    from lockstep.rescue import graph

    return [str(entry.get("name") or graph.entry_name(entry)) for entry in entries]


def _write_training(old: OldFile, target: Target, config: Config, handle: Any) -> str:
    if config is None or old.training is None or old.config is None:
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
