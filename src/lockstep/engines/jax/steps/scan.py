"""Several steps in one program, for `steps_per_execution`."""

from collections.abc import Callable, Iterator
from itertools import groupby
from numbers import Integral
from typing import Any

import jax
import numpy as np

from lockstep.engines.jax.on_devices.resident import Chosen
from lockstep.engines.jax.on_devices.sharded import StackedRows, is_sharded
from lockstep.engines.jax.steps.reading import whole
from lockstep.errors import UnsupportedModel

Program = Callable[[Any, Any], tuple[Any, Any]]

AUTO = "auto"

MOST_BYTES = 2**26
"""How much of the data may stand on the devices at once. A step on batches so large that
fewer than `steps_per_execution` fit in is long, and the call of its program no matter."""


def check_times(times: object) -> None:
    """Raise where `steps_per_execution` is neither a whole number of at least 1 nor "auto".

    Raises:
        UnsupportedModel: If that is so.
    """
    if times != AUTO and (not isinstance(times, Integral) or times < 1):
        raise UnsupportedModel(
            f"compile(steps_per_execution={times!r}) was asked for, and a whole number of at least "
            "1, or 'auto', is needed.\nTry 'auto'; lockstep bench says what may be won."
        )


def last(outputs: Any) -> Any:
    """Of the logs of several steps, stacked: those of the last one, as in Keras."""
    return jax.tree.map(lambda each: each[-1], outputs)


def every_row(outputs: Any) -> Any:
    """Of the predictions of several steps, stacked: all rows, in their order.

    Raises:
        TypeError: Where a prediction is a number, which has no rows.
    """

    def rows(each: Any) -> Any:
        if is_sharded(each):
            return StackedRows(each.padded, each.rows)
        if each.ndim < 2:
            raise TypeError(f"a prediction of the shape {each.shape[1:]}")
        return each.reshape(each.shape[0] * each.shape[1], *each.shape[2:])

    return jax.tree.map(rows, outputs, is_leaf=is_sharded)


def repeated(program: Program, collect: Callable[[Any], Any] = last) -> Program:
    """A program that runs `program` once for each of the batches that are stacked.

    Each step gets the state that the one before left. The state is returned as `program` returns
    it: whole, or the groups that each step changes.

    Args:
        program: State and batch in, outputs and state out.
        collect: What to return of the outputs of all steps, stacked.
    """

    def steps(state: Any, batches: Any) -> tuple[Any, Any]:
        changed: list[int] | None = None

        def body(state: Any, batch: Any) -> tuple[Any, Any]:
            nonlocal changed
            outputs, after = program(state, batch)
            if isinstance(after, dict):
                changed = list(after)
                after = whole(state, after)
            # A step of the user's own may return tuples where it was given lists.
            leaves = jax.tree.leaves(after)
            return jax.tree.unflatten(jax.tree.structure(state), leaves), outputs

        after, outputs = jax.lax.scan(body, state, batches)
        if changed is not None:
            after = {position: after[position] for position in changed}
        return collect(outputs), after

    return steps


def runs_of_alike(batches: list[Any]) -> list[list[Any]]:
    """The same batches in the same order, those after one another together that can be stacked."""
    return [
        part
        for key, run in groupby(batches, _key)
        for part in ([list(run)] if key is not None else [[batch] for batch in run])
    ]


def can_be_stacked(batch: Any) -> bool:
    """Whether several batches like this one can be stacked: host arrays, and nothing else."""
    return _key(batch) is not None


def _key(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    if not leaves or not all(type(leaf) is np.ndarray and leaf.ndim for leaf in leaves):
        return None
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def stacked(batches: list[Any]) -> Any:
    """Alike batches as one, with the step as the first dim of every array."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def few_bytes(batches: list[Any]) -> bool:
    """Whether so many alike batches may be put on the devices at once."""
    return len(batches) <= most_batches(batches[0])


def most_batches(batch: Any) -> int:
    """How many batches like this one may be put on the devices at once."""
    leaves = [batch] if isinstance(batch, Chosen) else jax.tree.leaves(batch)
    each: int = sum(leaf.nbytes for leaf in leaves if hasattr(leaf, "nbytes"))
    return MOST_BYTES // max(each, 1)


def is_worth_it(trace: Callable[[], Any], platform: str) -> bool:
    """Whether one program for several steps is right and no slower than one for each.

    On a CPU a convolution within a loop is several times slower than outside of it
    (docs/performance.md). And a loop takes only a step whose state keeps its types.

    Args:
        trace: Traces the program for several steps.
        platform: Where it would run.
    """
    try:
        traced = trace()
    except TypeError:
        return False
    return platform != "cpu" or not any(
        name.startswith("conv_general_dilated") for name in _primitives(traced.jaxpr.jaxpr)
    )


def _primitives(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for parameter in equation.params.values():
            for part in parameter if isinstance(parameter, list | tuple) else [parameter]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _primitives(inner)
