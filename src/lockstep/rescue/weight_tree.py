"""The layers of a model that own weights, in the order of old files.

A leaf is a layer with one slot per variable. Its dialects are the forms in which an old
file may store these variables. A branch is a nested model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from lockstep.rescue.rebuild import Part

Convert = Callable[[Any], Any]
Key = tuple[str, ...]


@dataclass(frozen=True)
class Dialect:
    """One way in which files store a layer: a shape and a conversion for each slot.

    CuDNNLSTM and CuDNNGRU store the matrices of each gate transposed, and two biases. Keras
    3's LSTM and GRU(reset_after=True) compute the same from the converted arrays.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    converts: tuple[Convert | None, ...]


@dataclass(frozen=True)
class Slot:
    """One variable of a layer, with its name within the layer in an old file."""

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
    layer: Any = None

    @property
    def signature(self) -> tuple[Any, ...]:
        """The shapes and kinds of the slots; leaves of one signature could exchange weights."""
        return tuple((slot.shape, slot.trainable, slot.key[-1:]) for slot in self.slots)


@dataclass(eq=False)
class Branch:
    """A nested model."""

    name: str
    children: list[Leaf | Branch] = field(default_factory=list)


def leaves(node: Leaf | Branch) -> Iterator[Leaf]:
    """Yield all leaves below a node, in the order of old files."""
    if isinstance(node, Leaf):
        yield node
    else:
        for below in node.children:
            yield from leaves(below)


def branches(node: Leaf | Branch) -> Iterator[Branch]:
    """Yield all nested models below a node, without the node itself."""
    if isinstance(node, Branch):
        for below in node.children:
            if isinstance(below, Branch):
                yield below
                yield from branches(below)


def of_part(part: Part) -> Branch:
    """Return the tree of a model that was built from an old config."""
    positions = _positions(part.layer)
    seen: set[int] = set()

    def grow(one: Part) -> Leaf | Branch | None:
        if one.is_model:
            kept = [node for node in map(grow, one.parts) if node is not None]
            return Branch(one.name, kept) if kept else None
        if id(one.layer) in seen or not one.layer.weights:
            return None
        seen.add(id(one.layer))
        variables = list(one.layer.weights)
        return _leaf(one.name, one.class_name, one.layer, one.trainable, variables, positions)

    root = grow(part)
    return root if isinstance(root, Branch) else Branch(part.name)


def of_model(model: Any) -> Branch:
    """Return the tree of a live Keras 3 model."""
    positions = _positions(model)
    seen: set[int] = set()
    owned: set[int] = set()

    def grow(layer: Any) -> Leaf | Branch | None:
        inner = layer.layer if isinstance(layer, keras.layers.TimeDistributed) else layer
        if isinstance(inner, keras.Model):
            below = [*map(grow, inner.layers), leaf(_OWN_WEIGHTS, inner)]
            kept = [node for node in below if node is not None]
            return Branch(layer.name, kept) if kept else None
        if id(layer) in seen:
            return None
        seen.add(id(layer))
        return leaf(layer.name, layer)

    def leaf(name: str, layer: Any) -> Leaf | None:
        """Return a leaf; a model's own leaf has only the weights that no other leaf has."""
        taken = owned if isinstance(layer, keras.Model) else set()
        variables = [one for one in layer.weights if id(one) not in taken]
        owned.update(id(one) for one in variables)
        if not variables:
            return None
        flag = bool(layer.trainable)
        return _leaf(name, type(layer).__name__, layer, flag, variables, positions)

    root = grow(model)
    return root if isinstance(root, Branch) else Branch(model.name)


_OWN_WEIGHTS = "top_level_model_weights"  # name in tf.keras, which lists these weights last


def every_layer(layer: Any) -> list[Any]:
    """Return a layer and all layers within it, including wrapped layers and cells."""
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
    """Return the shortest path ends that distinguish the weights of one layer.

    Example:
        >>> keys(["lstm_1/lstm_cell_3/kernel:0", "lstm_1/lstm_cell_3/bias:0"])
        [('kernel',), ('bias',)]
        >>> keys(["bi/forward_gru_1/kernel:0", "bi/backward_gru_1/kernel:0"])
        [('forward', 'kernel'), ('backward', 'kernel')]
    """
    split = [_parts(path) for path in paths]
    for length in range(1, max(map(len, split), default=0) + 1):
        found = [parts[-length:] for parts in split]
        if len(set(found)) == len(found):
            return found
    return split


def _parts(path: str) -> Key:
    kept = []
    for part in path.split("/"):
        part = re.sub(r"(_\d+)*(:\d+)?$", "", part)
        if re.fullmatch(r"(lstm|gru|simple_rnn|conv_lstm\w*)_cell", part):
            continue
        side = re.match(r"(forward|backward)_", part)
        kept.append(side.group(1) if side else part)
    return tuple(kept)


def _positions(model: Any) -> dict[int, int]:
    return {id(variable): index for index, variable in enumerate(model.variables)}


def _leaf(
    name: str,
    class_name: str,
    layer: Any,
    trainable: bool,
    variables: list[Any],
    positions: dict[int, int],
) -> Leaf:
    trained = {id(variable) for variable in layer.trainable_weights}
    # In a frozen layer, only the names distinguish statistics, which are never trained.
    statistics = ("moving_mean", "moving_variance", "mean", "variance", "count")
    slots = [
        Slot(
            positions[id(variable)],
            variable.path,
            tuple(int(n) for n in variable.shape),
            id(variable) in trained if layer.trainable else variable.name not in statistics,
            key,
        )
        for variable, key in zip(variables, keys([one.path for one in variables]), strict=True)
    ]
    # Old layers list their trainable weights first, in any order of creation.
    slots.sort(key=lambda slot: not slot.trainable)
    dialects = _dialects(class_name, layer, slots)
    return Leaf(name, class_name, tuple(slots), trainable, dialects, layer)


def _dialects(class_name: str, layer: Any, slots: list[Slot]) -> tuple[Dialect, ...]:
    """Return the ways in which an old file may store the weights of a layer."""
    plain = Dialect("plain", tuple(slot.shape for slot in slots), (None,) * len(slots))
    gates = _gates(layer)
    if gates is None or any(
        slot.key[-1] not in ("kernel", "recurrent_kernel", "bias") for slot in slots
    ):
        return (plain,)
    shapes, converts = [], []
    for slot in slots:
        bias = slot.key[-1] == "bias"
        shapes.append((2 * slot.shape[-1],) if bias else slot.shape)
        converts.append(_converter(bias, gates))
    native = Dialect("CuDNN", tuple(shapes), tuple(converts))
    return (native,) if class_name.startswith("CuDNN") else (plain, native)


def _gates(layer: Any) -> int | None:
    if isinstance(layer, keras.layers.Bidirectional):
        return _gates(layer.forward_layer)
    if isinstance(layer, keras.layers.LSTM) and layer.use_bias:
        return 4
    if isinstance(layer, keras.layers.GRU) and layer.use_bias and layer.reset_after:
        return 3
    return None


def _converter(bias: bool, gates: int) -> Convert:
    def convert(stored: Any) -> Any:
        if bias:
            both = stored.reshape(2, -1)
            return both.sum(axis=0) if gates == 4 else both
        # Each gate's block is stored as (units, inputs) and declared as (inputs, units).
        blocks = np.split(stored, gates, axis=1)
        return np.hstack([b.reshape(b.shape[1], b.shape[0]).T for b in blocks])

    return convert
