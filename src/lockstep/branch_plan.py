"""What runs where in a model with layers on several devices, and a plan that balances it."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.devices import Device
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import calls_of, functional_of, layers_in, nodes_of
from lockstep.layout import Layout, layers_by_path

COPIES = 4
"""Arrays as large as a weight in a training step: the weight, its gradient, two slots of Adam."""

PARTS = 4
"""Parts of a batch for each device of a chain. Source: Huang et al., "GPipe", 2019, section 2.3:
with four parts a device, the time in which devices wait is negligible."""


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


def placed_layers(model: Any, layout: Layout) -> list[PlacedLayer]:
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


def transfers(model: Any, layout: Layout) -> list[Transfer]:
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


def _transfers(layer: Any, layout: Layout) -> Iterator[Transfer]:
    function = functional_of(layer)
    for node in nodes_of(function) if function is not None else []:
        to_device = layout.calls.get(id(node))
        for parent in node.parent_nodes:
            from_device = layout.calls.get(id(parent))
            if None not in (from_device, to_device) and from_device != to_device:
                size = _row_bytes(parent.outputs)
                source, target = parent.operation.name, node.operation.name
                yield Transfer(source, target, str(from_device), str(to_device), size)


def _devices(layer: Any, layout: Layout) -> list[str]:
    calls = [layout.calls.get(id(node)) for node in calls_of(layer)]
    return list(dict.fromkeys([layout.home(layer), *(each for each in calls if each)]))


def _counts(layer: Any) -> bool:
    import keras

    return not isinstance(layer, keras.layers.InputLayer)


def bytes_of(variable: Any) -> int:
    """Return the bytes of the value of a variable."""
    return int(math.prod(variable.shape) * _itemsize(variable.dtype))


def _row_bytes(outputs: Any) -> int | None:
    sizes = [_elements(tensor.shape) for tensor in outputs]
    if any(size is None for size in sizes):
        return None
    pairs = zip(sizes, outputs, strict=True)
    return sum((size or 0) * _itemsize(tensor.dtype) for size, tensor in pairs)


def _elements(shape: Any) -> int | None:
    rest = tuple(shape)[1:]
    return None if any(size is None for size in rest) else math.prod(rest)


def _itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


# ---------------------------------------------------------------------------------------- a plan


def plan(model: Any, devices: Sequence[Device]) -> tuple[dict[str, str], int]:
    """Choose devices for the layers of a functional or sequential model.

    Branches that do not need one another go to different devices. A model without such branches is
    cut into one piece for each device, and each batch into parts. The time of a layer is estimated
    by its multiplications. No device gets more weights than it has memory for, if its memory is
    known.

    Args:
        model: A built functional or sequential model.
        devices: The devices to use, at least two.

    Returns:
        The device of each layer by its path, and the number of parts of a batch.

    Raises:
        UnsupportedModel: If the model has no graph of layers, or does not fit.
    """
    function = functional_of(model)
    nodes = [] if function is None else nodes_of(function)
    if len(nodes) < len(devices):
        raise UnsupportedModel(
            f"{model.name!r} has {len(nodes)} calls of layers in a functional graph, and a plan "
            f"for {len(devices)} devices needs as many.\n"
            'Build a Sequential model first, or name layers: lockstep.place(model, {"dense*": 1}).'
        )
    costs = [cost(node.operation) for node in nodes]
    chosen, span = _side_by_side(nodes, costs, len(devices))
    parts = 1
    if span > 0.85 * sum(costs):  # nothing to run side by side
        weights = [COPIES * _weights(node.operation) for node in nodes]
        chosen = _pieces(model, costs, weights, devices)
        parts = PARTS * len(devices)
    by_name: dict[str, str] = {}
    for node, number in zip(nodes, chosen, strict=True):
        by_name.setdefault(node.operation.name, devices[number].name)
    paths = layers_by_path(model)
    return {name: device for name, device in by_name.items() if name in paths}, parts


def cost(operation: Any) -> float:
    """Estimate the multiplications of a call for one row of a batch."""
    inner = functional_of(operation)
    if inner is not None:
        return sum(cost(node.operation) for node in nodes_of(inner))
    node = calls_of(operation)[-1]
    given, made = list(node.input_tensors), list(node.outputs)
    elements = float(sum(_elements(tensor.shape) or 1 for tensor in made))
    name = type(operation).__name__
    if not hasattr(operation, "weights") or name == "Embedding":
        return elements
    if "Conv" in name and "LSTM" not in name:
        given = made
    places = max((math.prod(n or 1 for n in t.shape[1:-1]) for t in [*given, *made]), default=1)
    return elements + places * float(sum(math.prod(each.shape) for each in operation.weights))


def _weights(operation: Any) -> int:
    return sum(map(bytes_of, getattr(operation, "weights", [])))


def _side_by_side(nodes: list[Any], costs: list[float], count: int) -> tuple[list[int], float]:
    """Give each call the device on which it ends first; return them and the time of all."""
    ends: dict[int, tuple[float, int]] = {}
    free = [0.0] * count
    chosen = []
    for node, time in zip(nodes, costs, strict=True):
        parents = [ends[id(parent)] for parent in node.parent_nodes if id(parent) in ends]
        ready = max((end for end, _ in parents), default=0.0)
        near = max(parents)[1] if parents else 0
        order = sorted(range(count), key=lambda number: number != near)
        best = min(order, key=lambda number: max(ready, free[number]))
        free[best] = max(ready, free[best]) + time
        ends[id(node)] = free[best], best
        chosen.append(best)
    return chosen, max(free)


def _pieces(
    model: Any, costs: list[float], weights: list[int], devices: Sequence[Device]
) -> list[int]:
    """Cut a chain into one piece for each device, so that the longest piece is short.

    Dynamic programming over the number of layers and of pieces: `best[n]` is the time of the
    longest piece for the first `n` layers.
    """
    count = len(costs)
    never: tuple[float, list[int]] = (math.inf, [])
    best = [(0.0, list[int]()), *[never] * count]
    for device in devices:
        memory = device.memory or math.inf
        after = [never] * (count + 1)
        for last in range(1, count + 1):
            for first in range(last):
                time, cuts = best[first]
                if sum(weights[first:last]) > memory:
                    continue
                longest = max(time, sum(costs[first:last]))
                if longest < after[last][0]:
                    after[last] = longest, [*cuts, last]
        best = after
    if best[count][0] == math.inf:
        raise UnsupportedModel(
            f"{model.name!r} needs {sum(weights) / 2**30:.1f} GiB to train by an estimate, and "
            f"does not fit on {len(devices)} devices.\nUse more devices, or a smaller model."
        )
    bounds = [0, *best[count][1]]
    sizes = [last - first for first, last in itertools.pairwise(bounds)]
    return [number for number, size in enumerate(sizes) for _ in range(size)]
