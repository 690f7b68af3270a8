"""Lets Keras compute in float64 where its own code would choose float32."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import keras

from lockstep.keras_compat.layers import layers_in
from lockstep.keras_compat.rows import _dtypes, _named
from lockstep.keras_compat.trainers import _FROM_3_16

_LOWERED = "float64"
"""The type that Keras lowers to float32 in results of several types, on JAX and PyTorch.

keras/src/backend/common/dtypes.py, BIT64_TO_BIT32_DTYPE, which `result_type` reads.
"""
_PARSE = _named(keras.DTypePolicy, "_parse_name")
_nn = keras.src.backend.ops.nn if _FROM_3_16 else keras.src.backend.nn
_ATTENTION = _named(_nn, "dot_product_attention")


def compute_in_float64(*, whatever_is_asked: bool = False) -> None:
    """Make Keras compute in float64 in this process, from now on.

    Keras and JAX cache types, so the process cannot go back. Models that exist keep their types.

    Args:
        whatever_is_asked: Whether the names of shorter floats mean float64 as well, in policies
            such as mixed_bfloat16 and in `keras.ops.cast(x, "float32")`.
    """
    keras.config.set_floatx("float64")
    if whatever_is_asked and not names_mean_float64():
        # keras/src/backend/common/variables.py, standardize_dtype: the table has names, and types
        # of Python. The type of an array is another key, and stays what it is.
        short = dict.fromkeys((float, "float16", "bfloat16", "float32"), "float64")
        _dtypes.PYTHON_DTYPES_MAP.update(short)
        setattr(keras.DTypePolicy, _PARSE, _widened(getattr(keras.DTypePolicy, _PARSE)))
    _dtypes.BIT64_TO_BIT32_DTYPE[_LOWERED] = "float64"
    if keras.backend.backend() == "jax":
        importlib.import_module("jax").config.update("jax_enable_x64", True)
        # jax.nn.dot_product_attention computes the logits in float32 whatever it is given.
        setattr(_nn, _ATTENTION, _attention)


def _widened(parse: Callable[..., tuple[str, str]]) -> Callable[..., tuple[str, str]]:
    @functools.wraps(parse)
    def parsed(self: Any, name: str) -> Any:
        return tuple("float64" if "float" in each else each for each in parse(self, name))

    return parsed


def names_mean_float64() -> bool:
    """Whether the names of shorter floats mean float64 in this process."""
    return bool(_dtypes.PYTHON_DTYPES_MAP[float] == "float64")


def computes_in_float64() -> bool:
    """Whether `compute_in_float64` was called, or this backend needs no call."""
    return bool(_dtypes.BIT64_TO_BIT32_DTYPE[_LOWERED] == "float64")


def layers_not_in_float64(model: Any) -> list[Any]:
    """The layers of a model, itself included, that compute in another type."""
    return [layer for layer in layers_in(model) if layer.compute_dtype != "float64"]


def _attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Any:
    """Attention in the type of its inputs; see keras/src/backend/jax/nn.py."""
    ops = keras.ops
    logits = ops.einsum("btnh,bsnh->bnts", query, key)
    logits = logits * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + ops.cast(bias, logits.dtype)
    if attn_logits_soft_cap is not None:
        logits = attn_logits_soft_cap * ops.tanh(logits / attn_logits_soft_cap)
    rows, columns = logits.shape[-2:]
    seen = ops.tri(rows, columns, dtype="bool") if is_causal else True
    if mask is not None:
        seen = ops.logical_and(seen, mask)
    logits = ops.where(seen, logits, -1e30)
    return ops.einsum("bnts,bsnh->btnh", ops.softmax(logits, axis=-1), value)
