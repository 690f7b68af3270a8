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

    The variance is the mean squared distance from the mean, computed in a second pass.
    The mean of squares minus the squared mean would lose all digits for inputs far from
    zero.
    """
    axes = reduction_axes(layer)
    name = f"The input of layer {layer.name!r}"

    def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
        inputs = replica.true_rows(inputs, name)
        if mask is None:
            others = [inputs.shape[axis] for axis in axes if axis]
            count = replica.rows * math.prod(others)
            mean = replica.sum(inputs.sum(axes, keepdim=True)) / count
            distance = inputs - mean
        else:
            kept = replica.true_rows(mask, f"{name} (its mask)").unsqueeze(-1)
            kept = kept.broadcast_to(inputs.shape).bool()
            weights = kept.to(inputs.dtype)
            # Keras adds the same epsilon if there is a mask.
            count = replica.sum(weights.sum(axes, keepdim=True)) + keras.config.epsilon()
            mean = replica.sum(torch.where(kept, inputs, 0).sum(axes, keepdim=True)) / count
            distance = torch.where(kept, inputs - mean, 0)
        variance = replica.sum(distance.square().sum(axes, keepdim=True)) / count
        return mean.squeeze(axes), variance.squeeze(axes)

    return moments
