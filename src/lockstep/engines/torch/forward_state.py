"""What a forward pass may change, put back where a step fails."""

from typing import Any

import torch

from lockstep.keras_compat import layers_in, own_trainable_variables
from lockstep.state import rnn_states


class ForwardState:
    """Moving means, seeds and the like of one model, as they were before a step.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._tensors = _tensors_of(model)
        self._kept: dict[int, tuple[int, Any]] = {}

    def save(self) -> None:
        """Copy what has changed since the last copy."""
        for tensor in self._tensors:
            kept = self._kept.get(id(tensor))
            if kept is None or kept[0] != tensor._version:
                self._kept[id(tensor)] = (tensor._version, tensor.detach().clone())

    def put_back(self) -> None:
        """Put back the values of the last `save`."""
        with torch.no_grad():
            for tensor in self._tensors:
                version, value = self._kept[id(tensor)]
                if tensor._version != version:
                    tensor.copy_(value)


def _tensors_of(model: Any) -> list[Any]:
    layers = layers_in(model)
    weights = {id(variable) for layer in layers for variable in own_trainable_variables(layer)}
    variables = [v for v in model.non_trainable_variables if id(v) not in weights]
    return [variable.value for variable in [*variables, *rnn_states(model)]]
