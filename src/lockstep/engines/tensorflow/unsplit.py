"""Which steps one device has to run alone."""

from typing import Any

import keras
import tensorflow as tf

from lockstep.engines.tensorflow.layers import Plan
from lockstep.engines.tensorflow.proof.proof import Reasons


def unsplit_reason(model: Any, plan: Plan, reasons: Reasons, data: Any) -> str | None:
    """Why one device has to run whole batches, in words; `None` where they can be split.

    Replicas can share a step whose every operation lockstep knows. Code of the user's
    own may do anything with the rows it is given, and sees all of them.
    """
    if any(part is model for part in plan.whole):
        return f"({type(model).__name__}) is not proven to work row by row: {reasons[id(model)]}"
    if any(_is_composite(leaf) for leaf in keras.tree.flatten(data)):
        return "is given ragged or sparse tensors"
    return None


def own_step(model: Any, step: str) -> str | None:
    """Why a step is one whose operations are unknown, in words; `None` for Keras's own."""
    # keras/src/backend/tensorflow/trainer.py
    trainer = keras.src.backend.tensorflow.trainer.TensorFlowTrainer
    if model.run_eagerly:
        return "has run_eagerly=True"
    if getattr(type(model), step) is not getattr(trainer, step) or step in vars(model):
        return f"has a {step} of its own"
    return None


def _is_composite(leaf: Any) -> bool:
    return isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
