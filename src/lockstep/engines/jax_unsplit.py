"""Which layers keep a batch from being split."""

import re
from collections.abc import Collection, Iterator
from typing import Any


def merging_layers(jaxpr: Any, program: str, rows: Collection[int]) -> list[str]:
    """The layers that merge the batch with another dim, where devices repeat work for it.

    Uneven shards cannot be merged in place, so the partitioner may gather the rows
    first. A metric that flattens its few inputs has no layer's name, and is no news.

    Args:
        jaxpr: The traced step.
        program: The text of the compiled one.
        rows: The numbers of rows that do not divide over the devices.

    Returns:
        Their paths, or nothing where the program gathers nothing.
    """
    if not re.search(r" all-gather(-start)?\(", program):
        return []
    found = set()
    for path, equation in _equations(jaxpr, "", "reshape"):
        before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        merged = before and after and before[0] in rows and after[0] > before[0]
        split = before and after and after[0] in rows and before[0] > after[0]
        if path and (merged or split):
            found.add(path)
    return sorted(found)


def unsplittable_layers(jaxpr: Any, rows: Collection[int], replicas: int) -> list[str]:
    """The layers that XLA cannot compile for a batch that is split: it would end the process.

    XLA pads the uneven shards of a scatter's indices with an int32, whatever type they have
    (xla/service/spmd/spmd_partitioner_util.h, JAX 0.10.2). The gradient of a sort scatters by
    unsigned numbers, that of `keras.ops.median`, `quantile` and `keras.random.shuffle` too.

    Args:
        jaxpr: The traced step.
        rows: The numbers of rows of the batch.
        replicas: The number of devices.

    Returns:
        Their paths, "the loss" for what is in none; or nothing, where no shard of the indices
        can be uneven.
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


def _equations(jaxpr: Any, outer: str, name: str) -> Iterator[tuple[str, Any]]:
    """The equations whose primitive's name begins so, each with the path of its layer."""
    for equation in jaxpr.eqns:
        path = "/".join(filter(None, (outer, str(equation.source_info.name_stack))))
        if equation.primitive.name.startswith(name):
            # The transformations, as in "transpose(jvp(layer))", are no part of the path.
            yield re.sub(r"\w+\(|\)", "", path), equation
        for parameter in equation.params.values():
            for part in parameter if isinstance(parameter, list | tuple) else [parameter]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner, path, name)
