"""The moments of batch norm over the rows of all replicas."""

import math
from collections.abc import Callable
from typing import Any

import keras
import torch

from lockstep.engines.torch.replica import Replica
from lockstep.keras_compat import reduction_axes


def moments_over(layer: Any, replica: Replica) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a replacement for a batch norm's `_moments` that uses the global batch.

    Each replica gives the sum of its inputs and their squared distance from their own mean, which
    are joined by the formula of Chan, Golub and LeVeque, "Updating Formulae and a Pairwise
    Algorithm for Computing Sample Variances" (1979). The mean of squares minus the squared mean
    would lose all digits for inputs far from zero.
    """
    axes = reduction_axes(layer)
    name = f"The input of layer {layer.name!r}"

    def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
        inputs = replica.true_rows(inputs, name)
        others = math.prod(inputs.shape[axis] for axis in axes if axis)
        if mask is None:
            count = inputs.new_tensor(replica.rows * others)
            counts = inputs.new_tensor(replica.counts) * others
            total = inputs.sum(axes)
            own = total / max(len(inputs) * others, 1)
            squares = (inputs - _along(own, inputs, axes)).square().sum(axes)
            sums, squares = replica.gather_each(torch.stack([total, squares])).unbind(1)
        else:
            kept = replica.true_rows(mask, f"{name} (its mask)").unsqueeze(-1)
            kept = kept.broadcast_to(inputs.shape).bool()
            number = kept.to(inputs.dtype).sum(axes)
            total = torch.where(kept, inputs, 0).sum(axes)
            own = total / number.clamp(min=1)
            distance = torch.where(kept, inputs - _along(own, inputs, axes), 0)
            stacked = torch.stack([total, distance.square().sum(axes), number])
            sums, squares, counts = replica.gather_each(stacked).unbind(1)
            # Keras adds the same epsilon if there is a mask.
            count = counts.sum(0) + keras.config.epsilon()
        counts = counts.reshape(len(counts), -1)
        mean = sums.sum(0) / count
        away = sums / counts.clamp(min=1) - mean
        variance = (squares + counts * away.square()).sum(0) / count
        return mean, variance

    return moments


def _along(values: Any, inputs: Any, axes: Any) -> Any:
    """Return values of each channel in a shape that is broadcast to the inputs."""
    return values.reshape([1 if axis in axes else size for axis, size in enumerate(inputs.shape)])
