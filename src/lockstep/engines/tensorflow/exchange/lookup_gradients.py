"""The gradients of tables of weights, with the entries that they have on one device.

A lookup gives its table a sparse gradient, with one entry for each row that was looked up.
Optimizers square and clip these entries one by one, before they are added up. The entries of
indices that came with the rows of the batch are on the replica of these rows. The entries of
other indices, such as positions, are on every replica, and have to be added up.
"""

from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from lockstep.engines.tensorflow.exchange.replica_consistency import ReplicasDiffer
from lockstep.engines.tensorflow.exchange.traced_operations import calls_of

_SCOPE = "lockstep_own_rows"


def own_rows() -> AbstractContextManager[Any]:
    """Mark the operations made inside the context: they differ between replicas."""
    scope: AbstractContextManager[Any] = tf.name_scope(_SCOPE)
    return scope


def lookups_in(gradient: Any) -> list[Any]:
    """Return the gradients of the single lookups that a gradient consists of.

    A dense gradient is one alone.

    Raises:
        ReplicasDiffer: If the lookups are inside a function, where they cannot be told apart.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return [gradient]
    indices = _parts(gradient.indices)
    if len(indices) == 1:
        return [gradient]
    values = tf.split(gradient.values, [tf.shape(part)[0] for part in indices])
    return [
        tf.IndexedSlices(value, tf.cast(part, gradient.indices.dtype), gradient.dense_shape)
        for value, part in zip(values, indices, strict=True)
    ]


def joined(lookups: list[Any]) -> Any:
    """Return the gradient that consists of these lookups."""
    if len(lookups) == 1:
        return lookups[0]
    return tf.IndexedSlices(
        tf.concat([each.values for each in lookups], axis=0),
        tf.concat([each.indices for each in lookups], axis=0),
        lookups[0].dense_shape,
    )


def is_by_rows(lookup: Any) -> bool:
    """Return whether the indices of a lookup came with the rows of this replica."""
    left, seen = [lookup.indices], set()
    while left:
        tensor = left.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if _SCOPE in tensor.op.name:
            return True
        if not _is_length(tensor):
            left += tensor.op.inputs
    return False


def _parts(indices: Any) -> list[Any]:
    """Return the indices of the single lookups."""
    op = indices.op
    # tensorflow/python/eager/backprop_util.py, AggregateIndexedSlicesGradients
    if op.type == "Cast":
        return _parts(op.inputs[0])
    if op.type == "ConcatV2":
        return [part for each in op.inputs[:-1] for part in _parts(each)]
    while op.type in ("Cast", "Identity", "Reshape"):
        op = op.inputs[0].op
    if calls_of(op):
        raise ReplicasDiffer("it looks up rows of a weight inside a TensorFlow function")
    return [indices]


def _is_length(tensor: Any) -> bool:
    """Return whether a tensor is the size of another dim than the first, that of the rows."""
    op = tensor.op
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    begin = tf.get_static_value(op.inputs[1])
    if tensor.shape.rank != 0 or begin is None:
        return False
    rank = op.inputs[0].shape[0]
    return bool(begin[0] > 0 or (begin[0] < 0 and rank is not None and begin[0] + rank > 0))
