"""The moments of batch norm over the rows of all replicas."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from lockstep.engines.tensorflow.exchange.replicas import ReplicaGroup, TracedReplica
from lockstep.keras_compat import MOMENTS, reduction_axes


def moments_over(layer: Any, team: ReplicaGroup) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a replacement for a batch norm's `_moments` that uses the global batch.

    The variance is the mean squared distance from the mean, computed in a second pass.
    The mean of squares minus the squared mean would lose all digits for inputs far from
    zero.
    """
    plain = getattr(layer, MOMENTS)

    def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
        replica = team.current()
        if replica is None:
            alone: tuple[Any, Any] = plain(inputs, mask)
            return alone
        return _moments(layer, replica, inputs, mask)

    return moments


def _moments(layer: Any, replica: TracedReplica, inputs: Any, mask: Any) -> tuple[Any, Any]:
    axes = reduction_axes(layer)
    what = f"the input of {layer.name!r}"
    inputs = replica.true_rows(inputs, what)

    def total(value: Any) -> Any:
        return replica.sum(tf.reduce_sum(value, axes, keepdims=True))

    if mask is None:
        kept = tf.ones_like(inputs)
        count = tf.add_n(replica.exchange(tf.reduce_sum(kept, axes, keepdims=True)))
        mean = total(inputs) / count
        variance = total(tf.math.squared_difference(inputs, tf.stop_gradient(mean))) / count
    else:
        shape = tf.shape(inputs)
        kept = tf.broadcast_to(replica.true_rows(mask, what)[..., None], shape)
        kept = tf.cast(kept, "bool")
        weights = tf.cast(kept, inputs.dtype)
        count = tf.add_n(replica.exchange(tf.reduce_sum(weights, axes, keepdims=True)))
        # Keras adds the same epsilon if there is a mask.
        count += keras.config.epsilon()
        mean = total(tf.where(kept, inputs, 0)) / count
        variance = total(tf.square(tf.where(kept, inputs - mean, 0))) / count
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)
