"""Decides which models and batches the first device runs alone, by Keras's own step."""

from typing import Any

import keras
import torch
from torch.nn.modules import module as modules
from torch.nn.utils.parametrize import is_parametrized

from lockstep.engines.rowwise import is_container, is_in_float8
from lockstep.engines.torch.steps.layers import ReasonsByNumber, ReplicaPlan, unknown_rows
from lockstep.engines.torch.torch_compat import (
    DeviceContext,
    dispatch_modes,
    function_modes,
    hooks_of_saved_tensors,
)
from lockstep.keras_compat import (
    class_is_of_keras,
    is_rematerialized,
    layers_in,
    module_in_keras,
    stored_value,
)
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
    whole = {
        id(ReplicaPlan(model).candidates[number]): reason for number, reason in reasons.items()
    }
    if id(model) in whole:
        return f"({type(model).__name__}) is not known to work row by row: {whole[id(model)]}"
    replaced = replaced_class(model)
    if replaced is not None:
        return f"has a layer of {replaced} with a replaced method"
    for layer in layers_in(model):
        if is_rematerialized(layer):
            return f"computes layer {layer.name!r} again in the backward pass (RematScope)"
        if is_in_float8(layer):
            return f"has layer {layer.name!r} in float8, whose scale depends on the whole batch"
        if has_torch_hooks(layer):
            return f"has a hook or parametrization of PyTorch on layer {layer.name!r}"
    for variable in model.trainable_variables:
        tensor = stored_value(variable)
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            return f"has a hook on the gradient of {variable.path!r}"
    return unknown_rows(model, whole) if is_container(model) else None


def replaced_class(model: Any) -> str | None:
    """Return the name of a class of Keras that a script has changed, `None` without one.

    Another process has the class as Keras defines it.
    """
    kinds = {type(layer) for layer in layers_in(model) if module_in_keras(type(layer))}
    names = sorted(kind.__name__ for kind in kinds if not class_is_of_keras(kind))
    return names[0] if names else None


def around_operations() -> str | None:
    """Return what code of PyTorch runs around every operation or layer, `None` without any.

    It would see the rows of one device, and the workers do not have it.
    """
    found = None
    if any(getattr(modules, f"_global{name}") for name in _HOOKS):
        found = "runs with a global PyTorch module hook"
    # torch.set_default_device makes a DeviceContext.
    modes = [m for m in (*function_modes(), *dispatch_modes()) if not isinstance(m, DeviceContext)]
    if modes:
        found = f"runs inside {type(modes[-1]).__name__}, a mode of PyTorch"
    elif hooks_of_saved_tensors(True) is not None:
        found = "runs inside saved_tensors_hooks of PyTorch"
    return found and f"{found}, {_SEES_ROWS}"


def is_around_operations(reason: str) -> bool:
    """Return whether a reason is that of `around_operations`."""
    return reason.endswith(_SEES_ROWS)


_SEES_ROWS = "which would see only the rows of one device"


def has_torch_hooks(layer: Any) -> bool:
    """Return whether code of PyTorch's modules runs before or after the call of a layer.

    It runs outside of `call`, so it would see the rows of one device.
    """
    return any(getattr(layer, name) for name in _HOOKS) or is_parametrized(layer)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of `torch.nn.Module`, and with another prefix of its file."""


def rows_of(x: Any) -> tuple[str | None, int]:
    """Return why the inputs of a batch cannot be split, `None` if they can, and their rows."""
    leaves = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
    counts = {len(leaf) for leaf in leaves if leaf.ndim}
    if len(counts) != 1 or not leaves[0].ndim:
        return f"gets inputs with different numbers of rows {sorted(counts)} in one batch", 0
    (rows,) = counts
    return (None if rows else "gets a batch without rows"), rows


def unpacked(batch: Any) -> tuple[Any, Any, Any]:
    """Return inputs, targets and sample weights as tensors, as Keras converts them first."""
    if is_flat(batch) and len(batch) <= 3:  # walking a nest takes longer than the conversion
        tensors = [None if leaf is None else keras.ops.convert_to_tensor(leaf) for leaf in batch]
        x, y, sample_weight = [*tensors, None, None][:3]
        return x, y, sample_weight
    nest: tuple[Any, Any, Any] = keras.tree.map_structure(
        lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf),
        tuple(keras.utils.unpack_x_y_sample_weight(batch)),
    )
    return nest


def form_of_rows(batch: Any) -> Any:
    """Return the structure of a batch, the types and shapes of its rows, and if these differ."""
    flat = is_flat(batch)
    leaves = batch if flat else keras.tree.flatten(batch)
    structure = len(batch) if flat else str(keras.tree.map_structure(lambda leaf: 0, batch))
    rows = {len(leaf) for leaf in leaves if getattr(leaf, "ndim", 0)}
    forms = tuple(
        (leaf.dtype, leaf.ndim, leaf.shape[1:]) if isinstance(leaf, torch.Tensor) else type(leaf)
        for leaf in leaves
    )
    return structure, forms, (len(rows) == 1 and 0 not in rows) or tuple(sorted(rows))


def is_flat(batch: Any) -> bool:
    """Return whether a batch is a tuple of tensors, or `None`."""
    return type(batch) is tuple and all(
        leaf is None or isinstance(leaf, torch.Tensor) for leaf in batch
    )


def is_asked_for(model: Any) -> bool:
    """Return whether steps of a model are to be traced."""
    return bool(getattr(model, "jit_compile", False))
