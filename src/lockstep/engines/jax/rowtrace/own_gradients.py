"""The gradient that a user defines for a function, by `jax.custom_jvp` or `jax.custom_vjp`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

from lockstep.engines.jax.jax_compat import names_of_arguments
from lockstep.engines.jax.rowtrace.places import is_of_frameworks, wraps_any_function
from lockstep.engines.jax.rowtrace.primitive_rules import OTHER_ROWS
from lockstep.engines.jax.rowtrace.row_labels import (
    COLUMNS,
    DATA,
    NUMBER,
    Label,
    Mixed,
    Place,
    Row,
    Rows,
    RowsMeet,
    Same,
    Total,
    same_places,
)
from lockstep.engines.jax.rowtrace.traced_operation import Operation


@dataclass(frozen=True)
class OwnGradient:
    """A function with a gradient of its own, traced with this gradient.

    A `custom_jvp` is traced with the change of its operands: JAX derives the gradient from this.
    A `custom_vjp` is traced with the gradients of its results.

    Attributes:
        programs: The trace for each number of rows.
        given: The labels of its inputs.
        expected: The labels that its outputs need.
        in_loop: Whether it runs in a loop over rows. All that it computes is for one row there.
    """

    programs: list[Any]
    given: list[Label]
    expected: list[Label]
    in_loop: bool

    @classmethod
    def of(
        cls, operation: Operation, results: Sequence[Label], called: Sequence[Any]
    ) -> "OwnGradient":
        """Trace a call of such a function.

        Args:
            operation: The call.
            results: The labels of its results.
            called: Its program, for each number of rows.

        Raises:
            RowsMeet: If the gradient cannot be followed.
        """
        labels, first = operation.labels, operation.equations[0]
        place = replace(operation.place, operation="the sum of gradients")
        operands = [n for n, atom in enumerate(first.invars) if isinstance(atom, Var)]
        operands = [n for n in operands if first.invars.index(first.invars[n]) == n]
        inputs = [n for n in operands if has_gradient(first.invars[n])]
        outputs = [n for n, value in enumerate(first.outvars) if has_gradient(value)]
        of_inputs = [_gradient_label(labels[n], place) for n in inputs]
        of_outputs = [_gradient_label(results[n], place) for n in outputs]
        given, expected = [labels[n] for n in operands], [results[n] for n in outputs]
        if backward := not operation.name.startswith("custom_jvp"):
            given, expected = [*given, *of_outputs], [*expected, *of_inputs]
        else:
            given, expected = [*given, *(labels[n] for n in inputs)], [*expected, *expected]
        programs = []
        for equation, program in zip(operation.equations, called, strict=True):
            function = _called(equation, operands, outputs, program)
            shapes = [equation.invars[n].aval for n in operands]
            of_float = [operands.index(n) for n in inputs]
            changes = [equation.outvars[n].aval for n in outputs]
            trace = _backward(function, of_float) if backward else _forward(function, of_float)
            second = changes if backward else [shapes[n] for n in of_float]
            programs.append(jax.make_jaxpr(trace)(shapes, second))
        return cls(programs, given, expected, any(isinstance(label, Row) for label in labels))

    def check(self, found: Sequence[Label]) -> None:
        """Check the labels of the outputs.

        Raises:
            RowsMeet: If one is not as expected.
        """
        zeros = [_zero_outputs(program.jaxpr) for program in self.programs]
        for n, (wanted, label) in enumerate(zip(self.expected, found, strict=True)):
            if isinstance(wanted, Total) and all(n in each for each in zeros):
                continue  # a sum of zeros over any rows, such as the gradient of a scale of int8
            if not _is_as(wanted, label) and not (self.in_loop and isinstance(label, Row | Same)):
                why = OTHER_ROWS
                if isinstance(label, Mixed):
                    why = f"{label.place.operation} {label.why}"
                elif isinstance(wanted, Total):
                    why = "it is not a sum over rows"
                raise RowsMeet(f"has a custom gradient: {why}")


def is_of_frameworks_alone(operation: Operation, called: Sequence[Any]) -> bool:
    """Return whether such a function and its gradient are code of JAX, Keras or lockstep."""
    keys = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd")
    rules = [operation.params[key] for key in keys if key in operation.params]
    known = bool(rules) and all(map(is_of_frameworks, (*called, *rules)))
    return known and not any(map(wraps_any_function, called))


def has_gradient(value: Any) -> bool:
    """Return whether JAX differentiates with respect to a value of a program."""
    return bool(jnp.issubdtype(value.aval.dtype, jnp.inexact))


def _called(
    equation: Any, operands: Sequence[int], outputs: Sequence[int], program: Any
) -> Callable[[Sequence[Any]], list[Any]]:
    """Return an equation as a function of these operands, with these outputs."""
    inputs = [equation.invars[n] for n in operands]
    names = names_of_arguments(program)
    one = Jaxpr([], inputs, equation.outvars, [equation], equation.effects, names)
    function = jaxpr_as_fun(ClosedJaxpr(one, ()))

    def call(values: Sequence[Any]) -> list[Any]:
        made = function(*values)
        return [made[n] for n in outputs]

    return call


def _forward(function: Callable[..., list[Any]], places: Sequence[int]) -> Callable[..., Any]:
    """Return the function that computes the results and their changes."""

    def run(values: list[Any], changes: list[Any]) -> Any:
        some = [values[n] for n in places]
        return jax.jvp(lambda new: function(_replaced(values, places, new)), (some,), (changes,))

    return run


def _backward(function: Callable[..., list[Any]], places: Sequence[int]) -> Callable[..., Any]:
    """Return the function that computes the results and the gradients of its operands."""

    def run(values: list[Any], gradients: list[Any]) -> Any:
        some = [values[n] for n in places]
        made, pull = jax.vjp(lambda new: function(_replaced(values, places, new)), some)
        return made, pull(gradients)

    return run


def _replaced(values: list[Any], places: Sequence[int], given: Sequence[Any]) -> list[Any]:
    new = dict(zip(places, given, strict=True))
    return [new.get(n, value) for n, value in enumerate(values)]


def _gradient_label(label: Label, place: Place) -> Label:
    """Return the label of the gradient with respect to a value of this label."""
    if isinstance(label, Same):
        return Total(0, place)
    if isinstance(label, Rows) and label.content not in (NUMBER, COLUMNS):
        return replace(label, content=DATA)
    if isinstance(label, Row):
        return label
    raise RowsMeet("has a custom gradient, which cannot be analyzed")


def _zero_outputs(program: Jaxpr) -> set[int]:
    """Return the positions of the outputs of a program that are the constant 0."""
    zeros: set[Any] = set()

    def is_zero(atom: Any) -> bool:
        return atom in zeros if isinstance(atom, Var) else not np.any(atom.val)

    for equation in program.eqns:
        if equation.primitive.name in ("broadcast_in_dim", "convert_element_type"):
            zeros.update(equation.outvars if is_zero(equation.invars[0]) else ())
    return {n for n, atom in enumerate(program.outvars) if is_zero(atom)}


def _is_as(wanted: Label, found: Label) -> bool:
    if isinstance(wanted, Rows) and isinstance(found, Rows):
        known = found.content not in (NUMBER, COLUMNS)
        return known and wanted.dim == found.dim and same_places(wanted, found)
    if isinstance(wanted, Total) and isinstance(found, Total):
        return wanted.power == found.power
    return wanted == found
