"""Where the layers of one model run."""

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import UnsupportedBackend
from lockstep.keras_compat import functional_of, nodes_of, sublayers_of

_DEVICE = "_lockstep_device"
"""The attribute of a node of a functional graph that holds its device."""


@dataclass(frozen=True)
class Layout:
    """The device of every layer of one model, and of every call in its functional graphs.

    A layer that is called on two devices has its weights on the device of its first call.

    Attributes:
        devices: The names of the devices, in the order of their first use.
        layers: The device of each layer, by the `id` of the layer.
        calls: The device of each node of a functional graph, by the `id` of the node.
        parts: The number of parts into which the rows of a batch are split, one after another.
        chosen: The devices that were asked for, by layer name, for a second layout like this one.
    """

    devices: tuple[str, ...]
    layers: Mapping[int, str]
    calls: Mapping[int, str]
    parts: int = 1
    chosen: Mapping[str, str] = field(default_factory=dict)

    def home(self, layer: Any) -> str:
        """Return the device of a layer; the first device for a layer that is not known."""
        return self.layers.get(id(layer), self.devices[0])


def mark_node(node: Any, device: str) -> None:
    """Store the device on which this call of a functional graph runs."""
    vars(node)[_DEVICE] = device


def marked(model: Any) -> list[str]:
    """Return the devices that `lockstep.on` has given to calls in a model, in order."""
    found: dict[str, None] = {}
    for layer in model._flatten_layers():
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


def lay_out(model: Any, chosen: Mapping[str, str], default: str, parts: int = 1) -> Layout:
    """Give every layer of a model a device.

    A layer has the device that was chosen for it, else that of its first input, else that of the
    layer around it, else the default.

    Args:
        model: A Keras model.
        chosen: The device of layers, by their path.
        default: The device of layers with inputs of the model alone.
        parts: The number of parts of a batch.
    """
    paths = layers_by_path(model)
    explicit = {id(paths[path]): device for path, device in chosen.items()}
    layers: dict[int, str] = {}
    calls: dict[int, str] = {}
    _lay_out(model, default, explicit.get, layers, calls)
    used = dict.fromkeys([*calls.values(), *layers.values()])
    devices = tuple(used) or (default,)
    return Layout(devices, layers, calls, parts, dict(chosen))


def _lay_out(
    layer: Any,
    around: str,
    explicit: Callable[[int], str | None],
    layers: dict[int, str],
    calls: dict[int, str],
) -> None:
    layers.setdefault(id(layer), around)
    function = functional_of(layer)
    if function is not None:
        for node in nodes_of(function):
            operation = node.operation
            inputs = (calls.get(id(parent)) for parent in node.parent_nodes)
            follows = next((device for device in inputs if device is not None), around)
            device = vars(node).get(_DEVICE) or explicit(id(operation)) or follows
            calls[id(node)] = device
            if hasattr(operation, "_flatten_layers") and id(operation) not in layers:
                _lay_out(operation, device, explicit, layers, calls)
    previous = around
    chain = function is None and is_chain(layer)
    for inner in sublayers_of(layer):
        if id(inner) not in layers:
            device = explicit(id(inner)) or (previous if chain else around)
            previous = device
            _lay_out(inner, device, explicit, layers, calls)


def is_chain(layer: Any) -> bool:
    """Return whether a layer calls the layers in it one after the other."""
    import keras

    return isinstance(layer, keras.Sequential)


def no_branches(backend: str) -> UnsupportedBackend:
    """Return the error of an engine that runs all layers on every device."""
    return UnsupportedBackend(
        f"Layers were to run on several devices, and on {backend!r} lockstep runs all layers on "
        "every device so far.\nA .keras file moves between backends: set KERAS_BACKEND=jax before "
        "Keras is imported."
    )
