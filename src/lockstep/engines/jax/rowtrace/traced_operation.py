"""One operation of a function, as traced for each number of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lockstep.engines.jax.jax_compat import is_high, parameters
from lockstep.engines.jax.rowtrace.row_labels import (
    Count,
    Label,
    Place,
    Rows,
    RowsMeet,
    Same,
    rows_among,
)

Shape = tuple[int, ...]

BY_COUNT = "computes with the number of rows"


def named(text: str) -> frozenset[str]:
    """Return the names in a text."""
    return frozenset(text.split())


_SIZES = named(
    """
    limit_indices length new_sizes padding_config reps shape sizes slice_sizes start_indices
    """
)
"""Parameters that may depend on the number of rows: the rules compare them."""

_MADE_ANEW = named("bwd fwd_jaxpr_thunk jvp_jaxpr_fun jvp_jaxpr_thunk out_trees policy")
"""Parameters that are functions, made anew by each trace."""


@dataclass(frozen=True)
class Operation:
    """One operation, as traced for each number of rows.

    Attributes:
        equations: The equation of each trace.
        labels: The labels of its operands.
        sizes: The numbers of rows.
        place: Its layer and name.
    """

    equations: tuple[Any, ...]
    labels: list[Label]
    sizes: tuple[int, ...]
    place: Place

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return str(self.equations[0].primitive.name)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the first trace."""
        return parameters(self.equations[0])

    def param(self, key: str) -> tuple[Any, ...]:
        """Return a parameter's value in each trace."""
        return tuple(parameters(each)[key] for each in self.equations)

    def shape(self, operand: int) -> Shape:
        """Return the shape of an operand in the first trace."""
        return self.shapes(operand)[0]

    def shapes(self, operand: int) -> tuple[Shape, ...]:
        """Return the shape of an operand in each trace."""
        return tuple(shape_of(each.invars[operand]) for each in self.equations)

    def made(self, result: int) -> tuple[Shape, ...]:
        """Return the shape of a result in each trace."""
        return tuple(shape_of(each.outvars[result]) for each in self.equations)

    @property
    def rows(self) -> list[Rows]:
        """The labels of the operands with rows."""
        return rows_among(self.labels)


def shape_of(value: Any) -> Shape:
    """Return the shape of a variable or a literal of a program."""
    return tuple(getattr(value.aval, "shape", ()))


def dims_of_rows(shapes: Sequence[Shape]) -> list[int]:
    """Return the dims whose size depends on the number of rows."""
    return [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1]


def rows_of_shapes(shapes: Sequence[Shape], sizes: Sequence[int], content: str) -> Rows | None:
    """Return the label of an array whose rows its sizes alone show; `None` if it has none.

    Raises:
        RowsMeet: If several dims, or no multiple of the rows, differ between the traces.
    """
    if len({len(shape) for shape in shapes}) > 1:
        raise RowsMeet("creates as many dims as there are rows")
    dims = dims_of_rows(shapes)
    if not dims:
        return None
    if len(dims) > 1:
        raise RowsMeet("has an entry for each pair of rows")
    (dim,) = dims
    each = shapes[0][dim] // sizes[0]
    if any(shape[dim] != each * rows for shape, rows in zip(shapes, sizes, strict=True)):
        raise RowsMeet("has a size that is not a multiple of the number of rows")
    return Rows(dim, 1, each, content)


def agree(values: Sequence[Any]) -> None:
    """Raise `RowsMeet` if a parameter depends on the number of rows."""
    if any(value != values[0] for value in values):
        raise RowsMeet(BY_COUNT)


def compare_parameters(operation: Operation, followed: bool) -> None:
    """Compare the parameters that are no sizes between the traces.

    Args:
        operation: The operation.
        followed: Whether the programs among its parameters are followed, not compared.

    Raises:
        RowsMeet: If one differs.
    """
    for key in operation.params:
        if key not in _SIZES | _MADE_ANEW:
            values = [_compared(value, followed) for value in operation.param(key)]
            if key == "impl":  # methods of `row_draws` have a name that is their number
                values = [str(value) for value in operation.param(key)]
            if any(_differ(values[0], value) for value in values[1:]):
                raise RowsMeet(f"has a different {key} for a different number of rows")


def _compared(value: Any, followed: bool) -> Any:
    """Return what of a parameter must be the same in all traces."""
    if isinstance(value, tuple):
        return tuple(_compared(each, followed) for each in value)
    if is_high(value):
        return type(value) if followed else value
    if hasattr(getattr(value, "jaxpr", value), "eqns"):
        constants = tuple(map(np.asarray, getattr(value, "consts", ())))
        return None if followed else (str(value), constants)
    return value


def _differ(one: Any, other: Any) -> bool:
    if one is other:
        return False
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) != len(other) or any(map(_differ, one, other))
    if isinstance(one, np.ndarray | jax.Array) or isinstance(other, np.ndarray | jax.Array):
        return not np.array_equal(one, other)
    return bool(one != other)


def compare_sizes(operation: Operation) -> None:
    """Raise `RowsMeet` if a size among the parameters differs between the traces."""
    for key in _SIZES & operation.params.keys():
        agree(operation.param(key))


def known_values(operation: Operation) -> list[tuple[Any, ...]] | None:
    """Return the scalar operands in each trace, if all are known."""
    columns: list[tuple[Any, ...]] = []
    for label in operation.labels:
        if isinstance(label, Same) and label.value is not None:
            columns.append((label.value,) * len(operation.sizes))
        elif isinstance(label, Count) and label.values is not None:
            columns.append(label.values)
        else:
            return None
    return list(zip(*columns, strict=True)) or None
