"""Which layers keep a ragged batch from being split."""

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
    for path, before, after in _reshapes(jaxpr, ""):
        merged = before and after and before[0] in rows and after[0] > before[0]
        split = before and after and after[0] in rows and before[0] > after[0]
        if path and (merged or split):
            found.add(path)
    return sorted(found)


def _reshapes(jaxpr: Any, outer: str) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    for equation in jaxpr.eqns:
        path = "/".join(filter(None, (outer, str(equation.source_info.name_stack))))
        if equation.primitive.name == "reshape":
            # The transformations, as in "transpose(jvp(layer))", are no part of the path.
            layer = re.sub(r"\w+\(|\)", "", path)
            yield layer, equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        for parameter in equation.params.values():
            for part in parameter if isinstance(parameter, list | tuple) else [parameter]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _reshapes(inner, path)
