"""What runs where in a model with layers on several devices, and what goes between the devices."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.core.layout import Branches, layers_by_path
from lockstep.core.state import bytes_of, item_bytes
from lockstep.keras_compat import calls_of, functional_of, layers_in, nodes_of


@dataclass(frozen=True)
class Transfer:
    """Values that go from one device to another in each step.

    Attributes:
        source: The layer that computes them.
        target: The layer that takes them.
        from_device: The device of the first layer.
        to_device: The device of the second layer.
        row_bytes: The bytes for each row of a batch; `None` if a shape is not known.
    """

    source: str
    target: str
    from_device: str
    to_device: str
    row_bytes: int | None


@dataclass(frozen=True)
class PlacedLayer:
    """One line of the table of `lockstep.placement`.

    Attributes:
        layer: The path of the layer.
        device: The name of its device.
        weight_bytes: The bytes of its weights.
        row_bytes: The bytes of its outputs for each row of a batch; `None` if not known.
        receives: The transfers to this layer.
    """

    layer: str
    device: str
    weight_bytes: int
    row_bytes: int | None
    receives: tuple[Transfer, ...]


def placed_layers(model: Any, layout: Branches) -> list[PlacedLayer]:
    """Return the layers of a model with their devices, those inside of nested models too."""
    found = transfers(model, layout)
    paths = layers_by_path(model)
    lines: list[PlacedLayer] = []
    for path, layer in paths.items():
        if functional_of(layer) is not None or not _counts(layer):
            continue
        if any(path.startswith(f"{line.layer}/") for line in lines):
            continue  # a part of a layer, such as the cell of an LSTM
        outputs = [node.outputs for node in calls_of(layer)]
        lines.append(
            PlacedLayer(
                layer=path,
                device=", ".join(_devices(layer, layout)),
                weight_bytes=sum(map(bytes_of, layer.weights)),
                row_bytes=_row_bytes(outputs[-1]) if outputs else None,
                receives=tuple(each for each in found if each.target == layer.name),
            )
        )
    return lines


def transfers(model: Any, layout: Branches) -> list[Transfer]:
    """Return what goes from one device to another in the functional graphs of a model."""
    return [each for layer in layers_in(model) for each in _transfers(layer, layout)]


def cycle(found: Sequence[Transfer]) -> tuple[Transfer, Transfer] | None:
    """Return two transfers of which one goes back to the device of the other, `None` if none do."""
    for first in found:
        for second in found:
            pair = (first.from_device, first.to_device)
            if pair == (second.to_device, second.from_device):
                return first, second
    return None


def _transfers(layer: Any, layout: Branches) -> Iterator[Transfer]:
    function = functional_of(layer)
    for node in nodes_of(function) if function is not None else []:
        to_device = layout.calls.get(id(node))
        for parent in node.parent_nodes:
            from_device = layout.calls.get(id(parent))
            if None not in (from_device, to_device) and from_device != to_device:
                size = _row_bytes(parent.outputs)
                source, target = parent.operation.name, node.operation.name
                yield Transfer(source, target, str(from_device), str(to_device), size)


def _devices(layer: Any, layout: Branches) -> list[str]:
    calls = [layout.calls.get(id(node)) for node in calls_of(layer)]
    return list(dict.fromkeys([layout.home(layer), *(each for each in calls if each)]))


def _counts(layer: Any) -> bool:
    import keras

    return not isinstance(layer, keras.layers.InputLayer)


def _row_bytes(outputs: Any) -> int | None:
    sizes = [_elements(tensor.shape) for tensor in outputs]
    if any(size is None for size in sizes):
        return None
    pairs = zip(sizes, outputs, strict=True)
    return sum((size or 0) * item_bytes(tensor.dtype) for size, tensor in pairs)


def _elements(shape: Any) -> int | None:
    rest = tuple(shape)[1:]
    return None if any(size is None for size in rest) else math.prod(rest)
