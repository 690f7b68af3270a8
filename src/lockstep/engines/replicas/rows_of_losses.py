"""Which losses and metrics give one value for each row, by that row alone.

A Keras loss is a function with one value per row, followed by masks, weights and a reduction.
If the function works row by row, each replica calls it with its own rows. The values, which are
few numbers, are gathered, and Keras applies the rest to those of the global batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras

from lockstep.core.state import unique
from lockstep.engines.rowwise import Scratch, function_refused, is_declared
from lockstep.keras_compat import (
    LossFunctionWrapper,
    compiled_loss,
    compiled_metrics,
    is_code_of_keras,
    module_in_keras,
    options_of,
    single_losses,
)
from lockstep.training.overrides import is_keras


def losses_by_rows(model: Any) -> list[Any]:
    """Return the losses of a model whose `call` may take the rows of one replica."""
    # keras/src/trainers/compile_utils.py, CompileLoss, and keras/src/losses/loss.py, Loss.__call__
    compiled = compiled_loss(model)
    if compiled is None or not compiled.built or not is_keras(model, "compute_loss"):
        return []
    plain = keras.losses.Loss.__call__
    if not is_code_of_keras(plain):
        return []
    return unique([loss for loss in single_losses(compiled) if type(loss).__call__ is plain])


def metrics_by_rows(model: Any) -> list[Any]:
    """Return the metrics of a model whose function may take the rows of one replica."""
    # keras/src/metrics/reduction_metrics.py, MeanMetricWrapper.update_state
    compiled = compiled_metrics(model)
    if compiled is None or not compiled.built or not is_keras(model, "compute_metrics"):
        return []
    plain = keras.metrics.MeanMetricWrapper.update_state
    if not is_code_of_keras(plain):
        return []
    return unique(
        [
            each
            for each in compiled.metrics
            if getattr(type(each), "update_state", None) is plain
            and "update_state" not in vars(each)  # code of the user's, which may keep the outputs
        ]
    )


def why_whole(
    owner: Any,
    function: Callable[..., Any],
    options: dict[str, Any],
    y_true: Any,
    y_pred: Any,
    scratch: Callable[[], Scratch],
) -> str | None:
    """Return why a loss or metric takes the outputs of the global batch, `None` if own rows.

    Args:
        owner: The loss or metric.
        function: Its function of targets and outputs.
        options: What else the function is given.
        y_true: The targets of the global batch.
        y_pred: The outputs of one replica or of the global batch. Only their form is used.
        scratch: Makes the place where the backend computes while the function is followed.
    """
    source = wrapped_function(owner, function)
    if is_declared(source) or is_declared(owner):
        return None
    by_keras = is_of_keras(source)
    if len(y_pred.shape) > 1 and source in _BY_ROWS and by_keras and _is_along_classes(owner):
        return None
    given = partial(function, **options)
    return function_refused(given, (y_true, y_pred), asks_for_rows=not by_keras, scratch=scratch)


def wrapped_function(owner: Any, function: Any) -> Any:
    """Return the function that a loss wraps without other code, else `function`."""
    # keras/src/losses/losses.py, LossFunctionWrapper.call
    wraps = LossFunctionWrapper.call
    by_keras = is_code_of_keras(wraps) and getattr(function, "__func__", None) is wraps
    return owner.fn if by_keras else function


def is_of_keras(function: Any) -> bool:
    """Return whether a function is Keras's own."""
    return bool(module_in_keras(function))


def _is_along_classes(owner: Any) -> bool:
    axis = options_of(owner).get("axis", -1)
    return isinstance(axis, int) and (axis == -1 or axis > 0)


_BY_ROWS = (
    keras.losses.categorical_crossentropy,
    keras.losses.sparse_categorical_crossentropy,
    keras.metrics.sparse_top_k_categorical_accuracy,
    keras.metrics.top_k_categorical_accuracy,
)
"""Keras functions that work row by row, although following them may fail.

Keras merges rows and time steps into one dim. With an unknown sequence length they cannot
be told apart again.
"""
