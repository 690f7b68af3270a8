"""Several steps in one program, for `steps_per_execution`."""

import math
from collections.abc import Callable
from itertools import groupby
from typing import Any

import jax
import numpy as np

from lockstep.engines.jax.jax_compat import parameters, programs_of
from lockstep.engines.jax.steps.padded import StackedRows, is_padded

State = tuple[Any, ...]
Program = Callable[[Any, Any], tuple[Any, Any]]

MOST_BYTES = 2**26
"""The largest size of the stacked batches on the devices. Larger batches make steps so long that
the cost of calling a program does not matter."""


def last(outputs: Any) -> Any:
    """Return the logs of the last of several stacked steps, as in Keras."""
    return jax.tree.map(lambda each: each[-1], outputs)


def every_row(outputs: Any) -> Any:
    """Return all rows of the stacked predictions of several steps, in order.

    Raises:
        TypeError: If a prediction is a scalar.
    """

    def rows(each: Any) -> Any:
        if is_padded(each):
            return StackedRows(each.padded, each.rows)
        if each.ndim < 2:
            raise TypeError(f"a prediction of the shape {each.shape[1:]}")
        return each.reshape(each.shape[0] * each.shape[1], *each.shape[2:])

    return jax.tree.map(rows, outputs, is_leaf=is_padded)


def repeated(program: Program, collect: Callable[[Any], Any] = last) -> Program:
    """Return a program that runs `program` once for each stacked batch.

    Each step gets the state that the step before returned. The state is returned in the form of
    `program`: all groups, or those that each step changes.

    Args:
        program: A function from state and batch to outputs and state.
        collect: Reduces the stacked outputs of all steps to the result.
    """

    def steps(state: Any, batches: Any) -> tuple[Any, Any]:
        changed: list[int] | None = None

        def body(state: Any, batch: Any) -> tuple[Any, Any]:
            nonlocal changed
            outputs, after = program(state, batch)
            if isinstance(after, dict):
                changed = list(after)
                after = merged(state, after)
            # A custom step may return tuples for lists.
            leaves = jax.tree.leaves(after)
            return jax.tree.unflatten(jax.tree.structure(state), leaves), outputs

        after, outputs = jax.lax.scan(body, state, batches)
        if changed is not None:
            after = {position: after[position] for position in changed}
        return collect(outputs), after

    return steps


def changed_groups(before: State, after: State) -> list[int]:
    """Return the positions of the groups of variables that a step changes, as it is traced."""

    def arrays(group: Any) -> list[int]:
        return [id(array) for array in jax.tree.leaves(group)]

    pairs = enumerate(zip(before, after, strict=True))
    return [position for position, (old, new) in pairs if arrays(old) != arrays(new)]


def merged(before: State, changed: dict[int, Any]) -> State:
    """Return the state after a step: the changed groups, and all other groups of `before`."""
    return tuple(changed.get(position, group) for position, group in enumerate(before))


def runs_of_alike(batches: list[Any]) -> list[list[Any]]:
    """Group consecutive batches that can be stacked, in order."""
    return [
        part
        for key, run in groupby(batches, _key)
        for part in ([list(run)] if key is not None else [[batch] for batch in run])
    ]


def can_be_stacked(batch: Any) -> bool:
    """Return whether batches like this one can be stacked: all leaves are host arrays."""
    return _key(batch) is not None


def _key(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    if not leaves or not all(type(leaf) is np.ndarray and leaf.ndim for leaf in leaves):
        return None
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def stacked(batches: list[Any]) -> Any:
    """Stack batches of equal shapes, with the step as the first dim of every array."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def few_bytes(batches: list[Any]) -> bool:
    """Return whether these batches may be on the devices at once."""
    return len(batches) <= most_batches(batches[0])


def most_batches(batch: Any) -> int:
    """Return the number of batches like this one that may be on the devices at once."""
    each: int = sum(leaf.nbytes for leaf in jax.tree.leaves(batch) if hasattr(leaf, "nbytes"))
    return MOST_BYTES // max(each, 1)


def is_worth_it(trace: Callable[[], Any], platform: str) -> bool:
    """Return whether one program for several steps works and is as fast as one for each.

    On a CPU a convolution inside a loop is several times slower than outside (docs/faster.md).
    A loop also needs a step whose state keeps its dtypes.

    Args:
        trace: Traces the program for several steps.
        platform: The platform that it would run on.
    """
    try:
        traced = trace()
    except TypeError:
        return False
    return platform != "cpu" or not _has_convolutions(traced.jaxpr.jaxpr)


MOST_NUMBERS = 2**22
"""The most numbers that the operations of a step on a CPU compute, for steps at once by themselves.

A matrix product counts as a number for each 32 multiplications. `benchmarks/steps_at_once.py`
measures where several steps in one program stop to be faster.
"""


def is_short(traced: Any) -> bool:
    """Return whether a step on a CPU takes so little that the call of its program matters.

    Args:
        traced: The traced program of one step.
    """
    jaxpr = traced.jaxpr.jaxpr
    return not _has_convolutions(jaxpr) and numbers_computed(jaxpr) <= MOST_NUMBERS


def numbers_computed(jaxpr: Any) -> float:
    """Return about how many numbers the operations of a program compute; see `MOST_NUMBERS`."""
    total = 0.0
    for equation in jaxpr.eqns:
        bodies = [numbers_computed(body) for body in programs_of(equation)]
        name = equation.primitive.name
        if name == "while":
            return math.inf  # as often as the data say
        if bodies:
            total += max(bodies) * parameters(equation).get("length", 1)
            continue
        size = sum(math.prod(each.aval.shape) for each in equation.outvars)
        if name == "dot_general":
            (contracted, _), _ = parameters(equation)["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            size *= max(1, math.prod(shape[dim] for dim in contracted) / 32)
        total += size
    return total


def _has_convolutions(jaxpr: Any) -> bool:
    return any(
        equation.primitive.name == "conv_general_dilated"
        or any(map(_has_convolutions, programs_of(equation)))
        for equation in jaxpr.eqns
    )
