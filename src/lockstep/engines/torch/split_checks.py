"""Decides which models and batches the first device runs alone, by Keras's own step."""

from typing import Any

import keras

from lockstep.engines.rowwise import is_container
from lockstep.engines.torch.layers import Plan, unknown_rows
from lockstep.engines.torch.row_proofs import ReasonsByNumber
from lockstep.keras_compat import is_rematerialized, layers_in
from lockstep.training.overrides import is_keras


def why_custom(model: Any, kind: str) -> str | None:
    """Return why the operations of a step are unknown, `None` for Keras's own step."""
    name = f"{kind}_step"
    return None if is_keras(model, name) else f"has a {name} of its own"


def unsplit_model(model: Any, reasons: ReasonsByNumber) -> str | None:
    """Return why the batches of a model cannot be split, `None` if they can.

    Args:
        model: The model.
        reasons: Why parts of it are not known to work row by row.
    """
    whole = {id(Plan(model).candidates[number]): reason for number, reason in reasons.items()}
    if id(model) in whole:
        return f"({type(model).__name__}) is not known to work row by row: {whole[id(model)]}"
    for layer in layers_in(model):
        if is_rematerialized(layer):
            return f"computes layer {layer.name!r} again in the backward pass (RematScope)"
    for variable in model.trainable_variables:
        tensor = variable.value
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            return f"has a hook on the gradient of {variable.path!r}"
    return unknown_rows(model, whole) if is_container(model) else None


def rows_of(x: Any) -> tuple[str | None, int]:
    """Return why the inputs of a batch cannot be split, `None` if they can, and their rows."""
    leaves = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
    counts = {len(leaf) for leaf in leaves if leaf.ndim}
    if len(counts) != 1 or not leaves[0].ndim:
        return f"is given inputs of {sorted(counts)} rows in one batch", 0
    (rows,) = counts
    return (None if rows else "is given a batch without rows"), rows
