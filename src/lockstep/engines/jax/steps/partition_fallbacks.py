"""Layers that prevent a batch from being split."""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend.core.primitives import select_and_scatter_add_p
from jax.sharding import NamedSharding

from lockstep.core.patched import patched
from lockstep.engines.jax.jax_compat import parameters, programs_of
from lockstep.errors import counted


def unsplittable_layers(jaxpr: Any, rows: Collection[int], replicas: int) -> list[str]:
    """Return the layers for which XLA would end the process if the batch were split.

    XLA pads the uneven shards of a scatter's indices with an int32, whatever their dtype
    (xla/service/spmd/spmd_partitioner_util.h, JAX 0.10.2). The gradient of a sort scatters by
    unsigned indices. So do the gradients of `keras.ops.median`, `quantile` and
    `keras.random.shuffle`.

    Args:
        jaxpr: The traced step.
        rows: The numbers of rows of the batch.
        replicas: The number of devices.

    Returns:
        The paths of the layers, with "the loss" for code outside any layer. Empty if no shard of
            the indices can be uneven.
    """
    ragged = any(number % replicas for number in rows)
    found = set()
    for path, equation in _equations(jaxpr, "", "scatter"):
        indices = equation.invars[1].aval
        dims = indices.shape[:-1]
        even = all(dim % replicas == 0 for dim in dims)
        by_rows = not ragged and any(dim in rows for dim in dims)
        if indices.dtype != "int32" and not even and not by_rows:
            found.add(path or "the loss")
    return sorted(found)


def why_whole(
    jaxpr: Any, rows: Collection[int], replicas: int, longer: Callable[[], Any]
) -> str | None:
    """Return the warning if every device needs the whole batch, `None` if it is split.

    Args:
        jaxpr: The traced step.
        rows: The numbers of rows of the batch.
        replicas: The number of devices.
        longer: Traces the same step for a batch of more rows.
    """
    if not rows:
        return None
    batch = counted(max(rows), "row")
    begin = f"A batch of {batch} over {replicas} devices is exact, but not split: "
    if layers := unsplittable_layers(jaxpr, rows, replicas):
        return (
            f"{begin}{', '.join(layers)}: XLA cannot split the gradient of a sort unevenly, so "
            "every device computes the whole batch.\nUse a batch size that is a multiple of the "
            "number of devices, or sort with ops.take_along_axis(x, ops.argsort(x, axis), axis)."
        )
    if layers := pooling_layers(jaxpr, rows, longer):
        return (
            f"{begin}{', '.join(layers)}: if rows are split, XLA computes a wrong gradient for "
            "max pooling along the rows, so every device computes the whole batch.\n"
            "Pool along a different dim, or use windows that do not overlap."
        )
    return None


def pooling_layers(jaxpr: Any, rows: Collection[int], longer: Callable[[], Any]) -> list[str]:
    """Return the layers whose max pooling has a gradient with overlapping windows over rows.

    If such a dim is split, XLA (JAX 0.10.2) omits a window's contribution to rows on another
    device. If the shapes do not show which dims are made of rows, a trace with more rows does.

    Args:
        jaxpr: The traced step.
        rows: The numbers of rows of the batch.
        longer: Traces the same step for a batch of more rows, and returns its jaxpr.

    Returns:
        The paths of the layers, with "the loss" for code outside any layer.
    """
    found = list(_equations(jaxpr, "", _POOLING))
    if not any(_may_pool_rows(equation, rows) for _, equation in found):
        return []
    try:
        others = [equation for _, equation in _equations(longer(), "", _POOLING)]
    except Exception:  # a step for this number of rows only: assume rows
        others = []
    if len(others) != len(found):
        return sorted({path or "the loss" for path, each in found if _may_pool_rows(each, rows)})
    pairs = zip(found, others, strict=True)
    return sorted(
        {path or "the loss" for (path, each), other in pairs if _pooled(each) != _pooled(other)}
    )


def pooling_whole(everywhere: NamedSharding) -> AbstractContextManager[None]:
    """Compute that gradient on whole arrays while operations run one by one in this context.

    Args:
        everywhere: The replicated layout.
    """
    original = select_and_scatter_add_p.impl

    def whole(source: Any, operand: Any, **parameters: Any) -> Any:
        along = _overlapping(operand.shape, parameters)
        if any(_is_split(array, along) for array in (source, operand)):
            source, operand = jax.device_put((source, operand), everywhere)
        return original(source, operand, **parameters)

    return patched([(select_and_scatter_add_p, "impl", whole)])


def _is_split(array: Any, dims: Collection[int]) -> bool:
    shard = array.sharding.shard_shape(array.shape)
    return any(shard[dim] != array.shape[dim] for dim in dims)


_POOLING = "select_and_scatter_add"


def _overlapping(shape: tuple[int, ...], parameters: dict[str, Any]) -> dict[int, int]:
    """Return the dims along which windows overlap, and their sizes."""
    steps = parameters["window_strides"]
    windows = enumerate(zip(shape, parameters["window_dimensions"], steps, strict=True))
    return {dim: size for dim, (size, wide, step) in windows if wide > step}


def _pooled(equation: Any) -> dict[int, int]:
    return _overlapping(equation.invars[1].aval.shape, parameters(equation))


def _may_pool_rows(equation: Any, rows: Collection[int]) -> bool:
    pooled, first = _pooled(equation), equation.invars[1].aval.shape[0]
    batch_first = 0 not in pooled and any(first % number == 0 for number in rows)
    others = all(size % number for size in pooled.values() for number in rows)
    return bool(pooled) and not (batch_first and others)


def _equations(jaxpr: Any, outer: str, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the equations whose primitive name begins with `name`, with their layer's path."""
    for equation in jaxpr.eqns:
        path = "/".join(filter(None, (outer, str(equation.source_info.name_stack))))
        if equation.primitive.name.startswith(name):
            # Transformations, as in "transpose(jvp(layer))", are not part of the path.
            yield re.sub(r"\w+\(|\)", "", path), equation
        for body in programs_of(equation):
            yield from _equations(body, path, name)
