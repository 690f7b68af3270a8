"""Builds a model on its first batch, with the types that a device has."""

from typing import Any

import jax
import keras

from lockstep import keras_compat


def build_on_first_batch(model: Any, batches: Any) -> None:
    """Build what of the model is not built yet, as `fit` and `evaluate` do."""
    keras_compat.build_on_first_batch(model, batches, as_on_device)


def as_on_device(batch: Any) -> Any:
    """Return a batch in which an array of a type that JAX does not have is a shape.

    Without `jax_enable_x64` a device has no 64 bits: int64 targets are int32 there. JAX 0.11.1 and
    later warn where Keras asks for a shape of a type of the host.
    """
    return keras.tree.map_structure(_as_on_device, batch)


def _as_on_device(leaf: Any) -> Any:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    try:
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        here = str(jax.dtypes.canonicalize_dtype(dtype))
    except (TypeError, ValueError):  # a type that JAX has nothing for, such as text
        return leaf
    return leaf if here == dtype else jax.ShapeDtypeStruct(leaf.shape, here)
