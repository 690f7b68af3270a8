"""Run a model on the parts of a batch, one after another, so that a chain of devices overlaps.

Only the call of the model is split. The loss and the metrics see the outputs of all rows, so every
loss is exact. Each part has operations of its own, which are other stages.
"""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep.engines.jax.branches.program_cut import part_scope
from lockstep.engines.rowwise import parts_of, refused
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import added_losses, functional_of, get_keras_mask, set_keras_mask


def call_in_parts(call: Callable[..., Any], parts: int, args: Any, kwargs: Any) -> Any:
    """Return the outputs of a call for all rows, computed part by part."""
    leaves = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.Array)]
    count = leaves[0].shape[0] if leaves and leaves[0].ndim else 0
    bounds = np.linspace(0, count, min(parts, count) + 1).astype(int).tolist()
    if len(bounds) < 3:
        return call(*args, **kwargs)

    def cut(rows: slice, leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, jax.Array) else leaf

    every = []
    for part, (first, last) in enumerate(itertools.pairwise(bounds)):
        rows = partial(cut, slice(first, last))
        with part_scope(part):
            given = keras.tree.map_structure(rows, (args, kwargs))
            every.append(call(*given[0], **given[1]))
    return keras.tree.map_structure(_joined, *every)


def _joined(*parts: Any) -> Any:
    if parts[0] is None:
        return None
    whole = jnp.concatenate(parts)
    masks = [get_keras_mask(part) for part in parts]
    if all(mask is not None for mask in masks):
        set_keras_mask(whole, jnp.concatenate(masks))
    return whole


def check_rows_apart(model: Any, inputs: Any, *, training: bool) -> None:
    """Raise if the outputs for some rows are not known to depend on these rows alone."""
    with_loss = [
        layer
        for layer in model._flatten_layers()
        if added_losses(layer) or getattr(layer, "activity_regularizer", None) is not None
    ]
    if with_loss:
        raise _refusal(model, with_loss[0], "adds a loss over all rows")
    candidates = [model] if functional_of(model) is None else parts_of(model)
    candidates = [each for each in candidates if not isinstance(each, keras.layers.InputLayer)]
    reasons = refused(model, candidates, inputs, training=training, scratch=_Scratch)
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
    for layer in reversed(model._flatten_layers()):
        for variable in layer.variables:
            if any(variable is each for each in changed):
                raise _refusal(model, layer, "has statistics or random numbers over all rows")


def _refusal(model: Any, layer: Any, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{model.name!r} was to run on parts of each batch, and {layer.name!r} "
        f"({type(layer).__name__}) {why}.\n"
        "The numbers would not be those of one device. Leave out parts=, or this layer."
    )


class _Scratch:
    """Where JAX computes what does not depend on the batch: nowhere else; see `rowwise.Scratch`."""

    def open(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def describe(self, tensor: Any) -> Any:
        return str(tensor.dtype), tuple(tensor.shape), np.asarray(tensor).tobytes()

    def cut(self) -> tuple[Any, str | None]:
        return None, None
