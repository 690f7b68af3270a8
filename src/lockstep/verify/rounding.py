"""The size of rounding: the last bit of the type that layers compute in."""

from typing import Any

import numpy as np

from lockstep.keras_compat import computes_in_float64
from lockstep.verify.verification import BOUND, DOUBLE_BOUND


def moved_by_last_bit(
    value: np.ndarray, random: np.random.Generator, bits: int | None = None
) -> np.ndarray:
    """Return an array with every float moved by its last bit, up or down at random.

    Args:
        value: Any array. An array of another type than floats is returned unchanged.
        random: The generator for the directions.
        bits: The bits of the significand in which the model computes, the implicit one
            included; `None` for those of `value`.
    """
    if value.dtype.kind != "f":
        return value
    own = np.finfo(value.dtype).nmant + 1
    step = np.spacing(np.abs(value)) * 2.0 ** (own - min(bits or own, own))
    moved: np.ndarray = np.where(random.random(value.shape) < 0.5, value + step, value - step)
    return moved.astype(value.dtype)


def significand_bits(model: Any) -> int:
    """Return the bits of the significand of the coarsest type that a layer computes in.

    Layers of float64 count as float32 where Keras computes parts of a step in float32.
    """
    bits = _bits_of_layers(model)
    return bits if computes_in_float64() else min(bits, 24)


def _bits_of_layers(model: Any) -> int:
    bits = [_SIGNIFICAND_BITS.get(str(model.compute_dtype), DOUBLE)]
    return min(bits + [_bits_of_layers(layer) for layer in getattr(model, "layers", [])])


def bound_of(bits: int) -> float:
    """Return the difference that rounding explains, without a control run."""
    return DOUBLE_BOUND if bits == DOUBLE else BOUND


DOUBLE = 53
"""The bits of the significand of float64."""

_SIGNIFICAND_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
