"""Gradients of LoRA's factors, without the gradient of the whole kernel.

A layer with LoRA computes with `kernel + scale * a @ b`. JAX would sum the gradient of that whole
kernel over the devices, and multiply it by the factors afterwards. Here the outputs of the layer
are the same, and the gradients of `a` and `b` come from the rows of each device: only they are
summed. Both are the same numbers, up to rounding.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import keras
from keras import ops

from lockstep.engines.patched import patched
from lockstep.keras_compat import layers_in

_FACTORS = "lora_kernel_a", "lora_kernel_b"

Product = Callable[[Any, Any, Any], Any]
"""Returns what the two factors give for the inputs of a layer."""


def lora_by_factors(model: Any) -> AbstractContextManager[None]:
    """Let the layers with LoRA have that gradient, while a training step is traced."""
    found = [(layer, _product(layer)) for layer in layers_in(model)]
    return patched((layer, "call", _call(layer, product)) for layer, product in found if product)


def _product(layer: Any) -> Product | None:
    """Return the product for a layer that computes as Keras's does, `None` for any other."""
    if not getattr(layer, "lora_enabled", False) or "call" in vars(layer):
        return None
    if layer.quantization_mode is not None:  # it multiplies by the factors itself
        return None
    if type(layer) is keras.layers.Dense:
        return lambda x, a, b: ops.matmul(ops.matmul(x, a), b)
    if type(layer) is keras.layers.EinsumDense:
        return _einsum(layer.equation)
    return None


def _einsum(equation: str) -> Product | None:
    """Return the product in two equations: the factors meet at the last letter of the kernel."""
    left, right, outputs = equation.replace("->", ",").split(",")
    last, between = right[-1], next(each for each in "zyxwvutsrq" if each not in equation)
    if last in left or last not in outputs or "." in equation:
        return None
    inner = outputs.replace(last, between)
    first = f"{left},{right[:-1]}{between}->{inner}"
    second = f"{inner},{between}{last}->{outputs}"
    return lambda x, a, b: ops.einsum(second, ops.einsum(first, x, a), b)


def _call(layer: Any, product: Product) -> Callable[..., Any]:
    call, activation = layer.call, layer.activation
    factors = [getattr(layer, name) for name in _FACTORS]
    scale = layer.lora_alpha / layer.lora_rank

    @functools.wraps(call)
    def call_by_factors(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        values = [ops.convert_to_tensor(factor) for factor in factors]
        constants = zip(_FACTORS, map(ops.stop_gradient, values), strict=True)
        with patched([(layer, "activation", None), *((layer, *each) for each in constants)]):
            outputs = call(inputs, *args, **kwargs)
        kind = outputs.dtype

        def given(inputs: Any, *factors: Any) -> Any:
            return ops.cast(scale * product(inputs, *factors), kind)

        outputs = _with_gradient(given, outputs, ops.cast(inputs, kind), *values)
        return outputs if activation is None else activation(outputs)

    return call_by_factors


def _with_gradient(function: Callable[..., Any], value: Any, constant: Any, *others: Any) -> Any:
    """Return a value whose gradient is also that of a function, by all arguments but the first."""

    @jax.custom_vjp
    def same(value: Any, constant: Any, *others: Any) -> Any:
        return value

    def forward(value: Any, constant: Any, *others: Any) -> Any:
        return value, (constant, others)

    def backward(saved: Any, gradient: Any) -> Any:
        constant, others = saved
        _, pull = jax.vjp(functools.partial(function, constant), *others)
        return gradient, None, *pull(gradient)

    same.defvjp(forward, backward)
    return same(value, constant, *others)
