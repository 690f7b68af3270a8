"""Declarations by the author of a layer."""

from typing import TypeVar

Declared = TypeVar("Declared")


def rowwise(layer: Declared) -> Declared:
    """Declare that a layer, loss or metric function works row by row.

    Each row of every output then depends on the same row of the inputs alone, in training
    and in inference. Engines with a copy of the model on each device split such a layer, and
    do not examine its code. A wrong declaration gives wrong numbers; `lockstep.verify` finds
    them.

    Args:
        layer: A Keras layer, a class of layers, or a function of targets and outputs.

    Returns:
        The same object, so that the function is usable as a decorator.

    Raises:
        AttributeError: If the object accepts no attributes, such as a built-in function.

    Example:
        >>> class Doubled(keras.layers.Layer):
        ...     def call(self, x):
        ...         return x * 2
        >>> lockstep.rowwise(Doubled) is Doubled
        True
    """
    layer._lockstep_rowwise = True  # type: ignore[attr-defined]
    return layer
