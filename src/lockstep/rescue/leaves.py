"""The layers of a model that own weights, as old files see them.

A leaf has slots, one per variable, with the shapes an old file may store for it;
a branch is a nested model. Their order is the order of old files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep.rescue import cudnn
from lockstep.rescue.cudnn import Dialect
from lockstep.rescue.graph import Part

Key = tuple[str, ...]


@dataclass(frozen=True)
class Slot:
    """One variable of a layer, and what an old file calls it within the layer."""

    index: int
    path: str
    shape: tuple[int, ...]
    trainable: bool
    key: Key


@dataclass(eq=False)
class Leaf:
    """A layer that owns weights."""

    name: str
    class_name: str
    slots: tuple[Slot, ...]
    trainable: bool
    dialects: tuple[Dialect, ...]

    @property
    def signature(self) -> tuple[Any, ...]:
        """Leaves with one signature could take each other's weights."""
        return tuple((slot.shape, slot.trainable, slot.key[-1:]) for slot in self.slots)


@dataclass(eq=False)
class Branch:
    """A nested model."""

    name: str
    children: list[Leaf | Branch] = field(default_factory=list)


def leaves(node: Leaf | Branch) -> Iterator[Leaf]:
    """All leaves below a node, in the order of old files."""
    if isinstance(node, Leaf):
        yield node
    else:
        for below in node.children:
            yield from leaves(below)


def branches(node: Leaf | Branch) -> Iterator[Branch]:
    """All nested models below a node, not the node itself."""
    if isinstance(node, Branch):
        for below in node.children:
            if isinstance(below, Branch):
                yield below
                yield from branches(below)


def of_part(part: Part) -> Branch:
    """The tree of a model that was built from an old config."""
    numbers = _numbers(part.layer)
    seen: set[int] = set()

    def grow(one: Part) -> Leaf | Branch | None:
        if one.is_model:
            below = [grow(inner) for inner in one.parts]
            kept = [node for node in below if node is not None]
            return Branch(one.name, kept) if kept else None
        if id(one.layer) in seen or not one.layer.weights:
            return None
        seen.add(id(one.layer))
        return _leaf(
            one.name, one.class_name, one.layer, one.trainable, numbers, list(one.layer.weights)
        )

    root = grow(part)
    return root if isinstance(root, Branch) else Branch(part.name)


def of_model(model: Any) -> Branch:
    """The tree of a live Keras 3 model."""
    import keras

    numbers = _numbers(model)
    seen: set[int] = set()
    owned: set[int] = set()

    def grow(layer: Any) -> Leaf | Branch | None:
        inner = layer.layer if isinstance(layer, keras.layers.TimeDistributed) else layer
        if isinstance(inner, keras.Model):
            below = [grow(one) for one in inner.layers]
            kept = [node for node in below if node is not None]
            own = leaf(_OWN_WEIGHTS, inner)
            kept += [own] if own else []
            return Branch(layer.name, kept) if kept else None
        if id(layer) in seen:
            return None
        seen.add(id(layer))
        return leaf(layer.name, layer)

    def leaf(name: str, layer: Any) -> Leaf | None:
        """What no leaf has yet: of a subclassed model, the weights that it made itself."""
        taken = owned if isinstance(layer, keras.Model) else set()
        variables = [one for one in layer.weights if id(one) not in taken]
        owned.update(id(one) for one in variables)
        if not variables:
            return None
        flag = bool(layer.trainable)
        return _leaf(name, type(layer).__name__, layer, flag, numbers, variables)

    root = grow(model)
    return root if isinstance(root, Branch) else Branch(model.name)


_OWN_WEIGHTS = "top_level_model_weights"  # as tf.keras names them, and as it puts them last


def every_layer(layer: Any) -> list[Any]:
    """A layer and all layers within it, wrapped ones and cells among them."""
    import keras

    found: dict[int, Any] = {}
    stack = [layer]
    while stack:
        here = stack.pop()
        if isinstance(here, keras.layers.Layer):
            if id(here) not in found:
                found[id(here)] = here
                stack += vars(here).values()
        elif isinstance(here, (list, tuple)):
            stack += here
        elif isinstance(here, dict):
            stack += here.values()
    return list(found.values())


def keys(paths: list[str]) -> list[Key]:
    """What tells the weights of one layer apart: as few last parts of their paths as will do.

    Example:
        >>> keys(["lstm_1/lstm_cell_3/kernel:0", "lstm_1/lstm_cell_3/bias:0"])
        [('kernel',), ('bias',)]
        >>> keys(["bi/forward_gru_1/kernel:0", "bi/backward_gru_1/kernel:0"])
        [('forward', 'kernel'), ('backward', 'kernel')]
    """
    split = [_parts(path) for path in paths]
    longest = max(map(len, split), default=0)
    for length in range(1, longest + 1):
        found = [parts[-length:] for parts in split]
        if len(set(found)) == len(found):
            return found
    return split


def _parts(path: str) -> Key:
    kept = []
    for part in path.split("/"):
        part = re.sub(r":\d+$", "", part)
        part = re.sub(r"(_\d+)+$", "", part)
        if re.fullmatch(r"(lstm|gru|simple_rnn|conv_lstm\w*)_cell", part):
            continue
        side = re.match(r"(forward|backward)_", part)
        kept.append(side.group(1) if side else part)
    return tuple(kept)


def _leaf(
    name: str,
    class_name: str,
    layer: Any,
    trainable: bool,
    numbers: dict[int, int],
    variables: list[Any],
) -> Leaf:
    nature = _by_nature(layer, variables)
    found = keys([variable.path for variable in variables])
    slots = tuple(
        Slot(
            numbers[id(variable)],
            variable.path,
            tuple(int(n) for n in variable.shape),
            natural,
            key,
        )
        for variable, natural, key in zip(variables, nature, found, strict=True)
    )
    # Old layers listed their trainable weights first, whatever the order they were made in.
    slots = tuple(sorted(slots, key=lambda slot: not slot.trainable))
    return Leaf(name, class_name, slots, trainable, cudnn.dialects(class_name, layer, slots))


def _by_nature(layer: Any, variables: list[Any]) -> list[bool]:
    """Which variables are trained when the layer is not frozen."""
    if layer.trainable:
        trained = {id(variable) for variable in layer.trainable_weights}
        return [id(variable) in trained for variable in variables]
    # Frozen: statistics are never trained, and layers made of layers are taken as a whole.
    statistics = ("moving_mean", "moving_variance", "mean", "variance", "count")
    return [variable.name not in statistics for variable in variables]


def _numbers(model: Any) -> dict[int, int]:
    return {id(variable): index for index, variable in enumerate(model.variables)}
