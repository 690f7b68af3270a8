"""The metadata of a tensor in Keras: its mask, and the logits it was computed from."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from lockstep.keras_compat import get_keras_mask, logits_of, set_keras_mask, set_logits

_PROBABILITIES = ("Softmax", "Sigmoid")


def remade(value: Any, make: Callable[[Any], Any]) -> Any:
    """Apply `make` to a tensor, its mask and its logits, and return the new tensor.

    A loss of probabilities uses the logits for numerical stability near 0 and 1. Keras finds
    them by an attribute that an activation sets, or by the operation of the tensor.

    Args:
        value: A tensor of a graph.
        make: Transforms one tensor. It is called for the tensor, its mask and its logits.
    """
    logits = logits_of(value)
    kind = _operation(value)
    if kind in _PROBABILITIES:
        before = make(value.op.inputs[0])
        new = (
            tf.raw_ops.Softmax(logits=before) if kind == "Softmax" else tf.raw_ops.Sigmoid(x=before)
        )
        if logits is not None:
            set_logits(new, before if logits is value.op.inputs[0] else make(logits))
    else:
        new = make(value)
        if logits is not None:
            set_logits(new, make(logits))
    mask = get_keras_mask(value)
    if mask is not None:
        set_keras_mask(new, make(mask))
    return new


def signature(value: Any) -> tuple[Any, ...]:
    """Return a tensor's operation, and the dtypes and shapes of it, its mask and its logits."""
    mask = get_keras_mask(value)
    parts = (value, mask, logits_of(value))
    known = [None if part is None else (part.dtype, str(part.shape[1:])) for part in parts]
    return (_operation(value), *known)


def mask_and_logits(value: Any) -> list[Any]:
    """Return the mask and the logits of a tensor, as far as it has them."""
    found = [get_keras_mask(value), logits_of(value)]
    if _operation(value) in _PROBABILITIES:
        found.append(value.op.inputs[0])
    return [tensor for tensor in found if tensor is not None]


def _operation(value: Any) -> str | None:
    # A softmax of one dim is over the batch.
    of_rows = isinstance(value, tf.Tensor) and hasattr(value, "op") and value.shape.rank != 1
    return value.op.type if of_rows else None


def known_rows(batch: Any) -> int | None:
    """Return the rows of a batch, `None` if they are unknown while tracing."""
    shapes = [leaf.shape for leaf in keras.tree.flatten(batch) if isinstance(leaf, tf.Tensor)]
    known = [shape[0] for shape in shapes if shape.rank]
    return known[0] if known else None
