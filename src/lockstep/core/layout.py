"""How one model is laid out: with all layers on every device, or with branches on devices."""

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.core.devices import REPLICATED, SHARDED
from lockstep.errors import LayoutConflict
from lockstep.keras_compat import functional_of, layers_in, nodes_of, sublayers_of

_DEVICE = "_lockstep_device"
"""The attribute of a node of a functional graph that holds its device."""


@dataclass(frozen=True)
class DataParallel:
    """Every device runs all layers, on its rows of a batch.

    Attributes:
        devices: The names of the devices.
        state: How the variables are laid out, `"replicated"` or `"sharded"`.
        same_random_numbers: Whether layers draw what one device draws, where there is a choice.
        micro_batch_size: The most rows that a device runs through the layers at once; `None` for
            all of its rows.
    """

    devices: tuple[str, ...]
    state: str = REPLICATED
    same_random_numbers: bool = False
    micro_batch_size: int | None = None
    made_by = "distribute"

    @property
    def is_sharded(self) -> bool:
        """Whether each device has a shard of each large variable."""
        return self.state == SHARDED


@dataclass(frozen=True)
class Branches:
    """The device of every layer of one model, and of every call in its functional graphs.

    A layer that is called on two devices has its weights on the device of its first call.

    Attributes:
        devices: The names of the devices, in the order of their first use.
        layers: The device of each layer, by the `id` of the layer.
        calls: The device of each node of a functional graph, by the `id` of the node.
        fixed: The layers and nodes, by `id`, that have their device whatever calls them. The others
            run on the device of the model or layer that calls them.
    """

    devices: tuple[str, ...]
    layers: Mapping[int, str]
    calls: Mapping[int, str]
    fixed: frozenset[int]
    is_sharded = False
    micro_batch_size = None
    made_by = "place"

    def home(self, layer: Any) -> str:
        """Return the device of a layer; the first device for a layer that is not known."""
        return self.layers.get(id(layer), self.devices[0])


Layout = DataParallel | Branches


def mark_node(node: Any, device: str) -> None:
    """Store the device on which this call of a functional graph runs."""
    vars(node)[_DEVICE] = device


def marked(model: Any) -> list[str]:
    """Return the devices that `lockstep.on` has given to calls in a model, in order."""
    found: dict[str, None] = {}
    for layer in layers_in(model):
        function = functional_of(layer)
        for node in nodes_of(function) if function is not None else []:
            device = vars(node).get(_DEVICE)
            if device is not None:
                found[device] = None
    return list(found)


def layers_by_path(model: Any) -> dict[str, Any]:
    """Return every layer inside a model, under the path of its names: `"inner/dense"`.

    The name of the model itself is no part of the path.
    """
    return dict(_paths(model, ""))


def _paths(layer: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for each in sublayers_of(layer):
        path = prefix + each.name
        yield path, each
        yield from _paths(each, f"{path}/")


def matches(pattern: str, path: str) -> bool:
    """Return whether a pattern names a layer, by its path or by its name alone.

    Args:
        pattern: As in a shell: `*` stands for any characters.
        path: The path of a layer.
    """
    name = path.rsplit("/", 1)[-1]
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(name, pattern)


def lay_out(model: Any, chosen: Mapping[str, str], default: str) -> Branches:
    """Give every layer of a model a device.

    A layer has the device that was chosen for it, else that of its first input, else that of the
    layer around it, else the default.

    Args:
        model: A Keras model.
        chosen: The device of layers, by their path.
        default: The device of layers with inputs of the model alone.
    """
    paths = layers_by_path(model)
    walk = _Walk({id(paths[path]): device for path, device in chosen.items()})
    walk.visit(model, default, fixed=True)
    used = dict.fromkeys([*walk.calls.values(), *walk.layers.values()])
    return Branches(tuple(used) or (default,), walk.layers, walk.calls, frozenset(walk.fixed))


class _Walk:
    """A walk through the layers of a model, from the outer ones to the inner ones.

    Args:
        chosen: The device of layers, by their `id`.
    """

    def __init__(self, chosen: Mapping[int, str]) -> None:
        self.layers: dict[int, str] = {}
        self.calls: dict[int, str] = {}
        self.fixed: set[int] = set()
        self._chosen = chosen

    def visit(self, layer: Any, around: str, *, fixed: bool) -> None:
        """Give the layers inside a layer their devices.

        Args:
            layer: The layer.
            around: Its device.
            fixed: Whether the layers inside have this device whatever calls the layer.
        """
        self.layers.setdefault(id(layer), around)
        function = functional_of(layer)
        if function is layer:
            for node in nodes_of(layer):
                self._visit_call(node, around, fixed)
        before, chain = (around, fixed), is_chain(layer)
        for inner in sublayers_of(layer):
            if id(inner) in self.layers:
                continue
            chosen = self._chosen.get(id(inner))
            follows, is_fixed = before if chain else (around, fixed)
            before = chosen or follows, is_fixed or chosen is not None
            if before[1]:
                self.fixed.add(id(inner))
            self.visit(inner, before[0], fixed=False)
        if function is not None and function is not layer:
            for node in nodes_of(function):  # a mask makes operations that are no layers
                self.calls[id(node)] = self.layers.get(id(node.operation), around)

    def _visit_call(self, node: Any, around: str, fixed: bool) -> None:
        operation = node.operation
        parents = [id(parent) for parent in node.parent_nodes if id(parent) in self.calls]
        chosen = vars(node).get(_DEVICE) or self._chosen.get(id(operation))
        device = chosen or (self.calls[parents[0]] if parents else around)
        self.calls[id(node)] = device
        if fixed or chosen is not None or (parents and parents[0] in self.fixed):
            self.fixed.add(id(node))
        if layers_in(operation) and id(operation) not in self.layers:
            self.visit(operation, device, fixed=False)


def is_chain(layer: Any) -> bool:
    """Return whether a layer calls the layers in it one after the other."""
    import keras

    return isinstance(layer, keras.Sequential)


def both_layouts(model: Any, asked: str) -> LayoutConflict:
    """Return the error for a model that is to be distributed and to have its layers placed."""
    return LayoutConflict(
        f"{model.name!r} has "
        f"{'layers on several' if asked == 'distribute' else 'copies on its'} devices, and "
        f"lockstep.{asked} would need a different layout.\nA model can be replicated or have "
        "branches on devices, but not both.\nCall lockstep.release(model) first."
    )
