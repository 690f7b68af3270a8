"""What rounding is: the last bit of the type that layers compute in."""

from typing import Any

import numpy as np

from lockstep.verify.verification import BOUND, DOUBLE_BOUND


def moved_by_last_bit(
    value: np.ndarray, random: np.random.Generator, bits: int | None = None
) -> np.ndarray:
    """Every float moved up or down, at random, by the last bit that counts.

    Args:
        value: Any array; what is not of floats comes back as it is.
        random: Draws the directions.
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
    """The bits of the significand in the coarsest type a layer computes in: 24 for float32."""
    bits = [_SIGNIFICAND_BITS.get(str(model.compute_dtype), 53)]
    return min(bits + [significand_bits(layer) for layer in getattr(model, "layers", [])])


def bound_of(bits: int) -> float:
    """The difference that rounding explains without a control run, over some tens of steps."""
    return DOUBLE_BOUND if bits == DOUBLE else BOUND


DOUBLE = 53
"""The bits of the significand of float64."""

_SIGNIFICAND_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
