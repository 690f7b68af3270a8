"""Timing of the steps of a fit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.experimental import sparse

from lockstep.engines.jax.steps.padded import PaddedArray
from lockstep.engines.jax.steps.step import StepFunction
from lockstep.training.step_clock import StepClock


class Clock(StepClock):
    """Time the steps of an epoch on JAX, where programs run; see `StepClock`."""

    def counting(self, function: Any) -> Any:
        """Return the step function of the model, made to count where a program runs."""
        if not isinstance(function, StepFunction):
            return function
        counted = self._counted(function.run, function.check_program)
        return replace(function, check_program=counted)

    def wait(self) -> None:
        """Wait until every device has done its steps."""
        jax.block_until_ready([variable.value for variable in self.model.variables])

    def _counted(self, run: Any, check_program: Callable[[Any, Any, Any], Any] | None) -> Any:
        def count(program: Any, state: Any, placed: Any) -> Any:
            if check_program is not None:
                placed = check_program(program, state, placed)
            steps, rows = _steps_and_rows(placed, several=program is not run)
            self.count(steps, steps * rows, rows)
            return placed

        return count


def _steps_and_rows(placed: Any, *, several: bool) -> tuple[int, int]:
    """Return the number of steps in the argument of a program, and the rows of each.

    Args:
        placed: A batch, or several stacked batches.
        several: Whether `placed` is several batches.
    """
    dim = 1 if several else 0
    for leaf in jax.tree.leaves(placed, is_leaf=lambda leaf: isinstance(leaf, _WHOLE)):
        shape = leaf.padded.shape if isinstance(leaf, PaddedArray) else leaf.shape
        if len(shape) > dim:
            rows = leaf.rows if isinstance(leaf, PaddedArray) else shape[dim]
            return (shape[0] if several else 1), rows
    return 1, 0


_WHOLE = (PaddedArray, sparse.JAXSparse)
