"""LoRA in a training step: the devices sum gradients of the factors, not of whole kernels.

Keras multiplies by the kernel `K + s A B`, so the gradients of `A` and `B` are made of that of the
whole sum, and XLA sums that one over the devices. Here the derivatives, of any order, are those of
`x K + s (x A) B`, which is the same function of the same arguments.
"""

import itertools
from collections.abc import Callable
from functools import partial, update_wrapper, wraps
from string import ascii_letters
from typing import Any

import jax
from keras import layers, ops

from lockstep.core.patched import patched
from lockstep.engines.jax.steps.state_layout import is_held_in_shards
from lockstep.keras_compat import EMBEDDINGS, KERNEL, layers_in, set_keras_mask


def with_lora_by_factors(model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a training step in which layers with LoRA take the gradients of their factors alone.

    A layer that is quantized, or that has a `call` or a sum of kernel and factors of its own, stays
    as it is.

    Args:
        model: The model.
        step: Its `train_step`, Keras's or the user's.
    """

    @wraps(step)
    def step_by_factors(*args: Any, **kwargs: Any) -> Any:
        found = [(layer, _call_by_factors(layer)) for layer in layers_in(model)]
        with patched(
            (layer, "call", TracedAnew(call)) for layer, call in found if call is not None
        ):
            return step(*args, **kwargs)

    return step_by_factors


class TracedAnew:
    """A function that replaces a method of a layer or model.

    `jax.checkpoint` finds the trace of a function by its hash, with the values of variables that
    the function has read. A method is another object each time that it is read, and is traced anew.
    So is this one: its hash differs each time.
    """

    _hashes = itertools.count()

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def __hash__(self) -> int:
        return next(self._hashes)


def _call_by_factors(layer: Any) -> Callable[..., Any] | None:
    """Return the call of a layer with those gradients, `None` for a layer that is left."""
    if not getattr(layer, "lora_enabled", False) or layer.quantization_mode is not None:
        return None  # quantized layers multiply by the factors themselves
    if _has_call_of(layer, layers.Dense, "kernel"):
        return partial(_dense, layer, ops.matmul, lambda x, a, b: ops.matmul(ops.matmul(x, a), b))
    if _has_call_of(layer, layers.EinsumDense, "kernel"):
        by_factors = _einsum_by_factors(layer.equation)
        whole = partial(ops.einsum, layer.equation)
        return by_factors and partial(_dense, layer, whole, by_factors)
    if _has_call_of(layer, layers.Embedding, "embeddings"):
        return partial(_embedding, layer)
    if _has_call_of(layer, layers.ReversibleEmbedding, "embeddings"):
        return partial(_reversible_embedding, layer)
    return None


def _has_call_of(layer: Any, kind: type, weight: str) -> bool:
    """Return whether a layer has Keras's own `call`, and its own sum of a weight and factors."""
    same = all(getattr(type(layer), name, None) is getattr(kind, name) for name in ("call", weight))
    return same and "call" not in vars(layer)


def _einsum_by_factors(equation: str) -> Callable[[Any, Any, Any], Any] | None:
    """Return the product of inputs with both factors of a kernel, one after the other.

    The first factor has all dims of the kernel but the last, and the second one has the last.
    """
    left, kernel, outputs = equation.replace("->", ",").split(",")
    last, rank = kernel[-1], next(each for each in ascii_letters if each not in equation)
    a, b = kernel[:-1] + rank, rank + last
    if last not in left:
        first = f"{left},{a}->{outputs.replace(last, rank)}"
        second = f"{outputs.replace(last, rank)},{b}->{outputs}"
        return lambda x, a, b: ops.einsum(second, ops.einsum(first, x, a), b)
    if last in outputs:  # a dim of the batch
        return None
    first = f"{left},{b}->{left.replace(last, rank)}"
    second = f"{left.replace(last, rank)},{a}->{outputs}"
    return lambda x, a, b: ops.einsum(second, ops.einsum(first, x, b), a)


def _dense(
    layer: Any,
    product: Callable[[Any, Any], Any],
    by_factors: Callable[[Any, Any, Any], Any],
    inputs: Any,
    training: Any = None,
) -> Any:
    # keras/src/layers/core/dense.py and einsum_dense.py, call
    added = by_factors(inputs, layer.lora_kernel_a, layer.lora_kernel_b)
    x = _sum(layer, KERNEL, "kernel", partial(product, inputs), added)
    if layer.bias is not None:
        x = ops.add(x, layer.bias)
    return x if layer.activation is None else layer.activation(x)


def _embedding(layer: Any, inputs: Any) -> Any:
    # keras/src/layers/core/embedding.py, call
    if inputs.dtype != "int32" and inputs.dtype != "int64":
        inputs = ops.cast(inputs, "int32")
    rows = ops.take(layer.lora_embeddings_a, inputs, axis=0)
    added = ops.matmul(rows, layer.lora_embeddings_b)
    x = _sum(layer, EMBEDDINGS, "embeddings", lambda table: ops.take(table, inputs, axis=0), added)
    return ops.cast(x, layer.compute_dtype)


def _reversible_embedding(layer: Any, inputs: Any, reverse: bool = False) -> Any:
    # keras/src/layers/core/reversible_embedding.py, call
    if not reverse:
        x = _embedding(layer, inputs)
        if (mask := layers.Embedding.compute_mask(layer, inputs)) is not None:
            set_keras_mask(x, mask)
        return x
    if not layer.tie_weights:
        return layers.ReversibleEmbedding.call(layer, inputs, reverse=True)

    def product(inputs: Any, table: Any) -> Any:
        given = inputs, ops.transpose(table)
        return ops.matmul(*(ops.cast(each, layer.reverse_dtype or each.dtype) for each in given))

    added = product(product(inputs, layer.lora_embeddings_b), layer.lora_embeddings_a)
    x = _sum(layer, EMBEDDINGS, "embeddings", partial(product, inputs), added)
    cap = layer.logit_soft_cap
    return x if cap is None else ops.multiply(ops.tanh(ops.divide(x, cap)), cap)


def _sum(
    layer: Any, weight: str, whole: str, product: Callable[[Any], Any], by_factors: Any
) -> Any:
    """Return the product of inputs with the sum of a weight and its factors.

    In half precision, and where every device has the weight, the value is that of Keras, bit for
    bit. In shards, the sum of both products takes a quarter less memory, and differs by rounding.

    Args:
        layer: The layer.
        weight: The attribute that has the weight without the factors.
        whole: The attribute that has their sum.
        product: Multiplies the inputs by a weight.
        by_factors: The product of the inputs with both factors.
    """
    variable = getattr(layer, weight)
    frozen = ops.convert_to_tensor(variable)  # once: a weight in shards is gathered
    separate = product(frozen)
    added = (layer.lora_alpha / layer.lora_rank) * by_factors
    if is_held_in_shards(variable) and layer.compute_dtype in ("float32", "float64"):
        return ops.cast(ops.add(separate, added), separate.dtype)
    with patched([(layer, weight, frozen)]):
        value = jax.lax.stop_gradient(product(getattr(layer, whole)))
    return _with_derivatives_of(value, ops.cast(ops.add(separate, added), value.dtype))


@jax.custom_jvp
def _with_derivatives_of(value: Any, same: Any) -> Any:
    """Return a value. All its derivatives are those of another way to compute the same."""
    return value


@_with_derivatives_of.defjvp
def _tangent(primals: Any, tangents: Any) -> Any:
    return _with_derivatives_of(*primals), tangents[1]  # itself, not `value`: for the next order
