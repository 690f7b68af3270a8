"""Decides which steps cannot be split over devices."""

from typing import Any

import keras
import tensorflow as tf

from lockstep.engines.rowwise import Reasons, is_in_float8
from lockstep.engines.tensorflow.steps.layers import ReplicaPlan
from lockstep.keras_compat import layers_in
from lockstep.training.overrides import is_keras


def unsplit_reason(model: Any, plan: ReplicaPlan, reasons: Reasons, data: Any) -> str | None:
    """Return why one device has to run global batches alone, `None` if they can be split.

    Replicas can split a step only if lockstep knows all its operations. A user's own code
    may combine rows in any way, so it runs on the global batch.
    """
    if any(part is model for part in plan.whole):
        return f"({type(model).__name__}) is not known to work row by row: {reasons[id(model)]}"
    for layer in layers_in(model):
        if is_in_float8(layer):
            return f"has layer {layer.name!r} in float8, whose scale depends on the whole batch"
    if any(_is_composite(leaf) for leaf in keras.tree.flatten(data)):
        return "gets ragged or sparse tensors"
    return None


def why_custom(model: Any, step: str) -> str | None:
    """Return why the operations of a step are unknown, `None` for Keras's own step."""
    if model.run_eagerly:
        return "has run_eagerly=True"
    if not is_keras(model, step):
        return f"has a {step} of its own"
    return None


def _is_composite(leaf: Any) -> bool:
    return isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
