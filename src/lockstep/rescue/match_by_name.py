"""Assign the arrays of an old file to variables by the names of weights and layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.rescue.read import Stored
from lockstep.rescue.weight_tree import Branch, Convert, Leaf, Slot, keys, leaves


@dataclass(frozen=True)
class Pair:
    """One array, its variable, and the conversion between them."""

    stored: Stored
    slot: Slot
    leaf: Leaf
    convert: Convert | None
    dialect: str = "plain"

    def values(self) -> Any:
        """Return the numbers of the array, in the layout of the new layer."""
        found = self.stored.read()
        return found if self.convert is None else self.convert(found)


@dataclass(frozen=True)
class Plan:
    """The array of the file for every weight of a model, and the rules that decided it."""

    pairs: tuple[Pair, ...]
    rules: tuple[str, ...]
    flat: bool = True
    """Whether one list of the file holds the whole model."""

    @property
    def key(self) -> frozenset[tuple[int, int]]:
        """The assignment as a set, for comparisons."""
        return frozenset((id(pair.stored), pair.slot.index) for pair in self.pairs)


def by_name(root: Branch, sources: Sequence[Stored], *, copies: bool) -> tuple[Pair, ...] | None:
    """Assign each weight to the layer in its name, or return None if that fails."""
    every = list(leaves(root))
    owned: dict[str, list[Stored]] = {leaf.name: [] for leaf in every}
    if len(owned) != len(every):
        return None  # two layers share a name, so names cannot decide
    prefixes: dict[str, str] = {}
    for stored in sources:
        owner = _owner(stored.name, owned, r"_\d+" if copies else "")
        if owner is None:
            return None
        name, prefix = owner
        if copies and prefixes.setdefault(name, prefix) != prefix:
            return None  # two layers of the file would map to one of the model
        owned[name].append(stored)
    pairs: list[Pair] = []
    for leaf in every:
        found = within_layer(leaf, owned[leaf.name])
        if found is None:
            return None
        pairs += found
    return tuple(pairs)


def _owner(name: str, layers: Iterable[str], suffix: str) -> tuple[str, str] | None:
    """Return the layer that comes first in the name of a weight, and how it stands there."""
    found = {
        layer: match
        for layer in layers
        if (match := re.search(rf"(?:^|/){re.escape(layer)}{suffix}(?=/)", name))
    }
    if not found:
        return None
    best = max(found, key=lambda layer: (-found[layer].start(), len(layer), layer))
    return best, found[best].group()


_OWN_NAMES = frozenset({"BatchNormalization", "LSTM", "GRU", "CuDNNLSTM", "CuDNNGRU", "SimpleRNN"})


def within_layer(leaf: Leaf, sources: Sequence[Stored]) -> tuple[Pair, ...] | None:
    """Assign the weights of one layer to its slots, by their names or else in order."""
    if len(sources) != len(leaf.slots):
        return None
    own = keys([stored.name for stored in sources])
    wanted = [slot.key for slot in leaf.slots]
    if sorted(own) == sorted(wanted) and len(set(own)) == len(own):
        return fit(leaf, [sources[own.index(key)] for key in wanted])
    last = [key[-1] for key in keys([f"x/{stored.name}" for stored in sources])]
    kinds = [key[-1] for key in wanted]
    named = len(set(wanted)) == len(wanted) and Counter(last) == Counter(kinds)
    if last != kinds and (named or leaf.class_name in _OWN_NAMES):
        return None  # other weight names belong to another kind of layer
    return fit(leaf, sources)


def fit(leaf: Leaf, ordered: Sequence[Stored]) -> tuple[Pair, ...] | None:
    """Return the pairs of one layer if the arrays have the shapes of one of its dialects."""
    shapes = tuple(stored.shape for stored in ordered)
    for dialect in leaf.dialects:
        if shapes == dialect.shapes:
            return tuple(
                Pair(stored, slot, leaf, convert, dialect.name)
                for stored, slot, convert in zip(ordered, leaf.slots, dialect.converts, strict=True)
            )
    return None
