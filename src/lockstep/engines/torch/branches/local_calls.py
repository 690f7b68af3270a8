"""Let each layer compute on Keras's current device, with its inputs and variables there.

PyTorch computes where the tensors are, and refuses tensors of two devices. A copy to another device
is an operation with a gradient, so the gradient of a weight arrives at the weight itself.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import torch

from lockstep.core.layout import Branches
from lockstep.core.patched import Replaced
from lockstep.engines.torch.branches.mixed_devices import one_device_each
from lockstep.engines.torch.exchange.placement import computes, current_device, version_of
from lockstep.keras_compat import (
    functional_of,
    get_keras_mask,
    layers_in,
    nodes_of,
    set_keras_mask,
    stored_value,
    sublayers_of,
    values_replaced,
)


def tensors_on(device: torch.device, tensors: Any) -> Any:
    """Return the tensors of a nest on a device, with their masks; other leaves stay.

    Between two GPUs this waits for nothing: PyTorch orders the copy on the devices.
    """

    def there(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == device:
            return leaf
        moved, mask = leaf.to(device), get_keras_mask(leaf)
        if mask is not None:
            set_keras_mask(moved, mask.to(device))
        return moved

    return keras.tree.map_structure(there, tensors)


@contextmanager
def copies_in_use(variables: list[Any], device: torch.device) -> Iterator[list[tuple[Any, Any]]]:
    """Let variables that are elsewhere have copies on a device as values, inside the context.

    Yields:
        A list. After the context it has the tensor of each variable that was assigned to, and the
        copy with its new value.
    """
    every = [(variable, stored_value(variable)) for variable in variables]
    away = [pair for pair in every if pair[1] is not None and pair[1].device != device]
    homes = [value for _, value in away]
    copies = [home.to(device) for home in homes]
    versions = list(map(version_of, copies))
    changed: list[tuple[Any, Any]] = []
    try:
        with values_replaced([variable for variable, _ in away], copies):
            yield changed
    finally:
        for home, copy, version in zip(homes, copies, versions, strict=True):
            if version_of(copy) != version:  # Keras assigns in place
                changed.append((home, copy))


def write_back(changed: list[tuple[Any, Any]]) -> None:
    """Write the values of copies into the tensors of their variables."""
    with torch.no_grad():
        for home, copy in changed:
            home.copy_(copy)


class LocalCalls:
    """Replaces, on the instances, the `call` of every layer and operation in a model.

    A layer in which no other layer has a device of its own is called as a whole: all its variables
    are copied at once, and not in each step of an RNN.

    Args:
        model: The model.
        layout: Where its layers run.
    """

    def __init__(self, model: Any, layout: Branches) -> None:
        self._model = model
        self._layout = layout
        self._replaced = Replaced()
        self._variables: dict[int, list[Any]] = {}

    def put_on(self) -> None:
        """Replace the methods."""
        self._walk(self._model, {id(self._model)})

    def take_off(self) -> None:
        """Undo `put_on`, except for methods that were replaced again since."""
        self._replaced.undo()

    def forget_variables(self) -> None:
        """List the variables of layers again: some were created."""
        self._variables.clear()

    def local(self, operation: Any, *, whole: bool) -> Callable[..., Any]:
        """Return the `call` of an operation, on the current device.

        Args:
            operation: A layer, or another operation of a functional graph.
            whole: Whether the variables of the layers in it are copied too.
        """
        call = operation.call

        @functools.wraps(call)
        def call_here(*args: Any, **kwargs: Any) -> Any:
            if not computes():
                return call(*args, **kwargs)
            device = current_device()
            args, kwargs = tensors_on(device, (args, kwargs))
            alone = one_device_each() if whole else nullcontext()
            with copies_in_use(self._variables_of(operation, whole), device) as changed, alone:
                outputs = call(*args, **kwargs)
            write_back(changed)
            return outputs

        return call_here

    def _walk(self, layer: Any, seen: set[int]) -> None:
        function = functional_of(layer)
        nodes = [] if function is None else nodes_of(function)
        for each in [*sublayers_of(layer), *(node.operation for node in nodes)]:
            if id(each) in seen:
                continue
            seen.add(id(each))
            whole = not self._is_split(each)
            self._replaced.replace(each, "call", self.local(each, whole=whole))
            if not whole:
                self._walk(each, seen)

    def _is_split(self, operation: Any) -> bool:
        """Return whether something inside has a device of its own."""
        if not isinstance(operation, keras.layers.Layer):
            return False
        inside = layers_in(operation)[1:]
        for layer in [operation, *inside]:
            function = functional_of(layer)
            inside += [] if function is None else nodes_of(function)
        return any(id(each) in self._layout.fixed for each in inside)

    def _variables_of(self, operation: Any, whole: bool) -> list[Any]:
        found = self._variables.get(id(operation))
        if found is None:
            found = list(getattr(operation, "variables", []))
            if not whole:
                inner = {id(v) for each in sublayers_of(operation) for v in each.variables}
                found = [variable for variable in found if id(variable) not in inner]
            self._variables[id(operation)] = found
        return found
