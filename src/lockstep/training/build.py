"""Builds the model, metrics, loss and optimizer before a step is traced."""

from typing import Any

import keras

from lockstep.core.state import optimizers_of
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import (
    build_from_batch,
    compiled_loss,
    compiled_metrics,
    compute_output_spec,
    is_built,
)


def build(model: Any, step: str, batch: Any) -> None:
    """Build what `step` of `model` needs and is not built yet.

    On one device, Keras builds while it traces the first step. Several replicas would
    each build their own variables there.

    Args:
        model: The model.
        step: `"train"`, `"test"` or `"predict"`.
        batch: A batch, or the specification of one.

    Raises:
        UnsupportedModel: If Keras cannot build it from shapes.
    """
    if is_ready(model, step):
        return
    batch = keras.tree.map_structure(_symbol, batch)
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    try:
        if step == "predict":
            compute_output_spec(model, x, training=False)
            return
        attributes, optimizer = vars(model), model.optimizer
        attributes["optimizer"] = None  # the optimizer is built below, only to train
        try:
            build_from_batch(model, batch)
        finally:
            attributes["optimizer"] = optimizer
    except RuntimeError as error:
        raise UnsupportedModel(
            f"{model.name!r} is not built, and Keras cannot build it from the shapes of a "
            "batch.\nCall the model on one batch first, model(x), and then distribute it."
        ) from error
    if step == "train" and optimizer is not None and not optimizer.built:
        # keras/src/optimizers/base_optimizer.py, BaseOptimizer.apply, builds it in this
        # scope, which gives the variables their names.
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(model.trainable_variables)


def is_ready(model: Any, step: str) -> bool:
    """Return whether everything that `step` of `model` needs is built."""
    return not unbuilt(model, step)


def unbuilt(model: Any, step: str) -> list[Any]:
    """Return what Keras's `step` of `model` may need and is not built yet."""
    parts = [] if is_built(model) else [model]
    if step != "predict":
        parts += [compiled_metrics(model), compiled_loss(model)]
    parts += [model.optimizer] if step == "train" else []
    return [part for part in parts if part is model or not (part is None or part.built)]


def is_ready_for_custom_step(model: Any, step: str) -> bool:
    """Return whether everything that a step of the user's own may use is built.

    It may use each optimizer among the attributes of the model.
    """
    parts: list[Any] = []
    if step == "train":
        parts += [optimizer for _, optimizer in optimizers_of(model)]
    if step != "predict":
        parts += [compiled_metrics(model), compiled_loss(model)]
    return is_built(model) and all(part is None or part.built for part in parts)


def _symbol(leaf: Any) -> Any:
    if leaf is None or not hasattr(leaf, "dtype"):
        return leaf
    is_text = getattr(leaf.dtype, "kind", "") in ("O", "S", "U")  # an array of NumPy
    dtype = "string" if is_text else keras.backend.standardize_dtype(leaf.dtype)
    return keras.KerasTensor(tuple(leaf.shape), dtype)
