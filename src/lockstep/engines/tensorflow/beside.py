"""What Keras keeps beside a tensor: its mask, and the logits that it was made from."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

_PROBABILITIES = ("Softmax", "Sigmoid")


def remade(value: Any, make: Callable[[Any], Any]) -> Any:
    """What `make` makes of a tensor, and of what Keras finds by it.

    A loss of probabilities goes back to the logits, by an attribute that an activation has
    left or by the operation that the tensor comes from: with probabilities alone it would
    give another number where they are nearly 0 or 1.

    Args:
        value: A tensor of a graph.
        make: Makes another tensor of it, the same number of times or rows for each of them.
    """
    # keras/src/backend/tensorflow/nn.py, _get_logits
    logits = getattr(value, "_keras_logits", None)
    kind = _operation(value)
    if kind in _PROBABILITIES:
        before = make(value.op.inputs[0])
        new = (
            tf.raw_ops.Softmax(logits=before) if kind == "Softmax" else tf.raw_ops.Sigmoid(x=before)
        )
        if logits is not None:
            new._keras_logits = before if logits is value.op.inputs[0] else make(logits)
    else:
        new = make(value)
        if logits is not None:
            new._keras_logits = make(logits)
    mask = keras.src.backend.get_keras_mask(value)  # keras/src/backend/common/masking.py
    if mask is not None:
        keras.src.backend.set_keras_mask(new, make(mask))
    return new


def signature(value: Any) -> tuple[Any, ...]:
    """What Keras's losses can tell of a tensor, and of what is beside it, before it has values."""
    mask = keras.src.backend.get_keras_mask(value)
    parts = (value, mask, getattr(value, "_keras_logits", None))
    known = [None if part is None else (part.dtype, str(part.shape[1:])) for part in parts]
    return (_operation(value), *known)


def beside(value: Any) -> list[Any]:
    """The tensors that Keras finds by this one."""
    found = [keras.src.backend.get_keras_mask(value), getattr(value, "_keras_logits", None)]
    if _operation(value) in _PROBABILITIES:
        found.append(value.op.inputs[0])
    return [tensor for tensor in found if tensor is not None]


def _operation(value: Any) -> str | None:
    # Of one dim a softmax is over the batch.
    of_rows = isinstance(value, tf.Tensor) and hasattr(value, "op") and value.shape.rank != 1
    return value.op.type if of_rows else None
