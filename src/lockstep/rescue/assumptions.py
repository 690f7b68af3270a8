"""Check the settings of a model that weights do not record.

With the same weights, Keras 3 layers compute other numbers under some old defaults and
names. The old config decides if the file has one. Otherwise the default of the old
library is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lockstep.rescue import weight_tree
from lockstep.rescue.keras2 import OldFile
from lockstep.rescue.match import Pair
from lockstep.rescue.rebuild import RENAMED
from lockstep.rescue.unwrap import is_model

_EARLY = ("LSTM", "GRU")
"""Layers with hard_sigmoid gates in early Keras; ConvLSTM has them in all of Keras 2."""


def doubts(
    old: OldFile, config: dict[str, Any] | None, model: Any, pairs: tuple[Pair, ...], early: bool
) -> Iterator[str]:
    """Yield a note for the user for each layer and reason.

    Args:
        old: The file.
        config: The old config of the template, if the file has it.
        model: The live model that takes the weights.
        pairs: The whole assignment.
        early: Whether recurrent layers of the file's library have hard_sigmoid gates and
            reset_after=False by default.
    """
    import keras

    if (old.version or "").startswith("3."):
        return
    entries = dict(_entries(config))
    every = weight_tree.every_layer(model)
    # Inner layers come after outer layers, so the innermost owner of a weight remains.
    owners = {id(v): one for one in every if not _is_model(one) for v in one.weights}
    for pair in pairs:
        layer = owners.get(id(model.variables[pair.slot.index]))
        if layer is None or pair.dialect != "plain":
            continue
        kind, told = _entry(entries, pair.stored.path)
        if kind == _kind(type(layer).__name__):
            yield from _otherwise(told, layer, pair.leaf.name)
        else:
            yield from _defaults(old, layer, pair.leaf.name, early)
    cells = {id(one.cell) for one in every if _is_gated(one) and hasattr(one, "cell")}
    for layer in every:
        used = [getattr(layer, key, None) for key in ("activation", "recurrent_activation")]
        if keras.activations.hard_sigmoid in used and id(layer) not in cells:
            yield (
                f"{layer.name} uses Keras 3's hard_sigmoid, clip(x / 6 + 0.5, 0, 1); "
                f"{old.library} had clip(0.2x + 0.5, 0, 1) under that name. Give that "
                "function, or rescue the full model."
            )


def _defaults(old: OldFile, layer: Any, name: str, early: bool) -> Iterator[str]:
    """Yield notes on changed defaults, for layers and cells whose old config is unknown."""
    import keras

    kind = _kind(type(layer).__name__)
    usual = kind == "ConvLSTM" or (early and kind in _EARLY)
    if usual and layer.recurrent_activation is keras.activations.sigmoid:
        yield (
            f"{name} uses sigmoid gates; {old.library} used hard_sigmoid unless told "
            "otherwise, and weights do not tell. Check outputs, or rescue the full model."
        )
    if early and getattr(layer, "reset_after", False) and not layer.use_bias:
        yield (
            f"{name} has reset_after=True; {old.library} had False unless told otherwise, and "
            "without a bias weights do not tell. Check outputs, or rescue the full model."
        )


def _otherwise(told: dict[str, Any], layer: Any, name: str) -> Iterator[str]:
    """Yield notes on differences between the file's config and the model."""
    import keras

    if _is_gated(layer):
        told = {"recurrent_activation": "hard_sigmoid", "reset_after": False, **told}
    for key in ("activation", "recurrent_activation", "reset_after", "epsilon"):
        mine, theirs = getattr(layer, key, None), told.get(key)
        if callable(mine):
            own = str(getattr(mine, "__name__", ""))
            if getattr(keras.activations, own, None) is not mine or not isinstance(theirs, str):
                continue  # a custom function cannot be compared
            mine, theirs = own, _NAMES.get(theirs, theirs)
        if None not in (mine, theirs) and mine != theirs:
            yield f"{name} has {key}={mine}, and the file's config says {theirs}."


def _is_gated(layer: Any) -> bool:
    return hasattr(layer, "recurrent_activation")


def _is_model(layer: Any) -> bool:
    import keras

    return isinstance(layer, keras.Model)


_NAMES = {"swish": "silu"}
Entry = tuple[str, dict[str, Any]]


def _entries(config: dict[str, Any] | None) -> Iterator[tuple[str, Entry]]:
    """Yield name, class and settings of the layers of an old config; wrappers are unwrapped."""
    stack: list[Any] = [config]
    while stack:
        here = stack.pop()
        if isinstance(here, list):
            stack += here
        elif isinstance(here, dict):
            if isinstance(here.get("config"), dict) and not is_model(here):
                yield str(here.get("name") or here["config"].get("name")), _unwrapped(here)
            stack += [value for key, value in here.items() if key != "inbound_nodes"]


def _unwrapped(entry: dict[str, Any]) -> Entry:
    inner = entry["config"].get("layer", entry["config"].get("cell"))
    if isinstance(inner, dict) and isinstance(inner.get("config"), dict):
        return _unwrapped(inner)
    return _kind(str(entry.get("class_name"))), entry["config"]


def _kind(class_name: str) -> str:
    """Return the kind of a layer class; cells and their layers are of one kind."""
    return re.sub(r"(Cell|\dD)$", "", RENAMED.get(class_name, class_name))


def _entry(entries: dict[str, Entry], path: str) -> Entry:
    """Return the class and settings of the innermost known layer in the path of an array."""
    return next((entries[part] for part in reversed(path.split("/")) if part in entries), ("", {}))
