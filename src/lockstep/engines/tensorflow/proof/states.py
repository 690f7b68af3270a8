"""What is known of a tensor in a traced layer: how it depends on the rows of the batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorflow.python.framework import ops

from lockstep.engines.tensorflow.proof.numbers import numbers


@dataclass(frozen=True)
class Same:
    """It does not depend on the rows, nor on how many there are: every replica has the same."""


@dataclass(frozen=True)
class Seed:
    """The seed of a generator, of which every replica has one of its own."""


@dataclass(frozen=True)
class Rows:
    """Its first dim is the batch, and each row depends on that row of the inputs alone.

    Attributes:
        each: How many entries of the first dim one row of the batch has, beside each other.
    """

    each: int = 1


@dataclass(frozen=True)
class Count:
    """A number: the rows of the batch, times `each`."""

    each: int = 1


@dataclass(frozen=True)
class Sizes:
    """A shape that begins with the rows of the batch, times `each`; the rest is the same."""

    each: int = 1


@dataclass(frozen=True)
class Unknown:
    """Nothing is known.

    Attributes:
        why: The operation that could not be proven, in words.
    """

    why: str


State = Same | Seed | Rows | Count | Sizes | Unknown

Rule = Callable[[Any, list[State]], State | None]
"""The state of every output of an operation, by those of its inputs; `None`: not known."""


def rank_of(tensor: Any) -> int:
    """The rank of a tensor, -1 where it is not known."""
    return -1 if tensor.shape.rank is None else int(tensor.shape.rank)


def first_rows(states: list[State]) -> Rows | None:
    """The rows of the first operand, where the others are the same for every replica."""
    first, *others = states
    same = all(isinstance(state, Same) for state in others)
    return first if isinstance(first, Rows) and same else None


def static(tensor: Any) -> list[Any] | None:
    """The numbers of a tensor that are known while tracing, flat; `None` where not all are."""
    value = numbers(tensor)
    flat = None if value is None else value.reshape(-1).tolist()
    return None if flat is None or None in flat else flat


def axis_of(tensor: Any, rank: int) -> list[int] | None:
    """The dims that an operand names, each at least 0; `None` where they are not known."""
    axes = static(tensor)
    return None if axes is None else [axis + rank if axis < 0 else axis for axis in axes]


def attribute(op: Any, name: str) -> Any:
    """An attribute of an operation, `None` where it has none."""
    try:
        return op.get_attr(name)
    except ValueError:
        return None


def function_of(op: Any, name: str) -> Any:
    """The graph of a function that an operation calls."""
    return op.graph._get_function(attribute(op, name).name).graph


def calls_of(op: Any) -> list[Any]:
    """The graphs of all functions that an operation calls."""
    found = []
    for description in op.op_def.attr:
        if description.type == "func":
            found.append(function_of(op, description.name))
        elif description.type == "list(func)":
            found += [op.graph._get_function(f.name).graph for f in op.get_attr(description.name)]
    return found


def has_own_gradient(op: Any) -> bool:
    """Whether an operation has a gradient of the user's own, of which nothing is known."""
    name = attribute(op, "_gradient_op_type")
    if name is None or op.type.endswith("PartitionedCall"):  # whose operations are looked at
        return False
    # tensorflow/python/ops/custom_gradient.py, _graph_mode_decorator: the function that
    # makes the gradient is in the closure of the one that is registered.
    found, looked = [ops.gradient_registry.lookup(name.decode())], []
    while found:
        function = found.pop()
        looked.append(function)
        for cell in function.__closure__ or ():
            inner = cell.cell_contents
            if hasattr(inner, "__closure__") and inner not in looked:
                found.append(inner)
    own = [f for f in looked if f.__module__ != "tensorflow.python.ops.custom_gradient"]
    return not own or any(f.__module__ not in _GRADIENTS_BY_ROWS for f in own)


_GRADIENTS_BY_ROWS = ("tensorflow.python.ops.nn_impl",)  # swish, elementwise
