"""Run a model on the parts of a batch, one after another, so that a chain of devices overlaps.

Only the call of the model is split. The loss and the metrics see the outputs of all rows, so every
loss is exact. Each part has operations of its own, which are other stages.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras

from lockstep.engines.rowwise import Scratch, refused
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import (
    added_losses,
    functional_of,
    get_keras_mask,
    layers_in,
    operations_of,
    set_keras_mask,
)


def call_in_parts(
    call: Callable[..., Any],
    parts: int,
    rows: Callable[[Any, int], Any],
    scope: Callable[[int], AbstractContextManager[Any]],
    args: Any,
    kwargs: Any,
) -> Any:
    """Return the outputs of a call for all rows, computed part by part.

    Args:
        call: The function to call.
        parts: The number of parts.
        rows: Returns the rows of a tensor that are in one part.
        scope: Makes the context of the operations on one part.
        args: The arguments of the call.
        kwargs: The arguments of the call by name.
    """

    def of(part: int) -> Any:
        return keras.tree.map_structure(
            lambda leaf: rows(leaf, part) if keras.ops.is_tensor(leaf) else leaf, (args, kwargs)
        )

    every = []
    for part in range(parts):
        with scope(part):
            given = of(part)
            every.append(call(*given[0], **given[1]))
    return keras.tree.map_structure(_joined, *every)


def _joined(*parts: Any) -> Any:
    if parts[0] is None:
        return None
    whole = keras.ops.concatenate(parts)
    masks = [get_keras_mask(part) for part in parts]
    if all(mask is not None for mask in masks):
        set_keras_mask(whole, keras.ops.concatenate(masks))
    return whole


def check_rows_apart(
    model: Any, inputs: Any, *, training: bool, scratch: Callable[[], Scratch]
) -> None:
    """Raise if the outputs for some rows are not known to depend on these rows alone.

    Args:
        model: The model.
        inputs: A batch of its inputs.
        training: Whether the model is called in training mode.
        scratch: Makes the place where the backend computes without the batch; see `refused`.
    """
    with_loss = [
        layer
        for layer in layers_in(model)
        if added_losses(layer) or getattr(layer, "activity_regularizer", None) is not None
    ]
    if with_loss:
        raise _refusal(model, with_loss[0], "adds a loss over all rows")
    candidates = [model] if functional_of(model) is None else operations_of(model)
    candidates = [each for each in candidates if not isinstance(each, keras.layers.InputLayer)]
    reasons = refused(model, candidates, inputs, training=training, scratch=scratch)
    for each in candidates:
        if id(each) in reasons:
            why = f"is not known to work row by row ({reasons[id(each)]})"
            raise _refusal(model, each, why)


def check_unchanged(model: Any, changed: list[Any]) -> None:
    """Raise if a step changes variables that are not trained.

    Args:
        model: The model.
        changed: The changed variables: statistics, counters or random seeds.
    """
    for layer in reversed(layers_in(model)):
        for variable in layer.variables:
            if any(variable is each for each in changed):
                raise _refusal(model, layer, "has statistics or random numbers over all rows")
    if changed:
        raise _refusal(model, model, "changes variables that no layer of it has")


def _refusal(model: Any, layer: Any, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{model.name!r} was to run on parts of each batch, and {layer.name!r} "
        f"({type(layer).__name__}) {why}.\n"
        "The numbers would not be those of one device. Give parts=1, or leave out this layer."
    )
