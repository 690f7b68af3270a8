# mypy: implicit-reexport
# ruff: noqa: F401
"""Every private name of JAX that lockstep uses, and what differs between versions of JAX.

No other module names a private part of JAX, or reads a parameter of an operation from its equation.
Checked with JAX 0.7.0, 0.10.2 and 0.12.0.1; `core/tried_versions.py` has the bounds.

Raises:
    UnsupportedFramework: If this JAX is too old, or lacks a name.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from lockstep.core.tried_versions import TRIED, check_oldest
from lockstep.errors import UnsupportedFramework

check_oldest("jax", jax.__version__)
NEWEST = TRIED["jax"].newest

# ----------------------------------------------------------------------------- private names

try:
    from jax._src import distributed, xla_bridge
    from jax.interpreters.partial_eval import dce_jaxpr

    xla_bridge.backends  # noqa: B018 (starts the devices once, at every first use of one)
    xla_bridge.backends_are_initialized  # noqa: B018
    distributed.global_state.client  # noqa: B018 (what jax.distributed.initialize connects)
except (ImportError, AttributeError) as error:
    raise UnsupportedFramework(
        f"JAX {jax.__version__} lacks an internal function that lockstep needs: {error}.\n"
        f"It exists up to JAX {NEWEST}, but may change in any version.\n"
        f'Run pip install "jax<={NEWEST}"'
    ) from error

REPEATED_TRACE = "create_pjit_jaxpr"
"""The end of the name of the function where JAX 0.7 traces a function that it keeps traced."""

# --------------------------------------------------------------------- parameters of operations


class _Parameters(dict[str, Any]):
    """The parameters of an operation: one that JAX has no longer is an error in words."""

    def __init__(self, equation: Any) -> None:
        super().__init__(equation.params)
        self._operation = str(equation.primitive.name)

    def __missing__(self, name: str) -> Any:
        raise _unknown(self._operation, f"has no parameter {name!r}")


def parameters(equation: Any) -> dict[str, Any]:
    """Return the parameters of an operation.

    Raises:
        UnsupportedFramework: By the result, if a parameter is read that this JAX does not have.
    """
    return _Parameters(equation)


def scan_counts(equation: Any) -> tuple[int, int]:
    """Return the number of constants of a scan, and of values that it carries.

    JAX before 0.11 has two numbers. Since then the operands and the results are flat trees.

    Raises:
        UnsupportedFramework: If this JAX has neither.
    """
    params = parameters(equation)
    if {"num_consts", "num_carry"} <= params.keys():
        return int(params["num_consts"]), int(params["num_carry"])
    try:
        constants, carried, _ = params["ft_in"].unpack()
        return len(constants), len(carried)
    except (AttributeError, TypeError, ValueError) as error:
        raise _unknown("scan", "describes its carried values differently") from error


def _unknown(operation: str, problem: str) -> UnsupportedFramework:
    return UnsupportedFramework(
        f"The operation {operation} {problem} in JAX {jax.__version__}, but lockstep needs it.\n"
        f"Install a version of JAX that lockstep was tested with; the newest is {NEWEST}.\n"
        f'Run pip install "jax<={NEWEST}"'
    )


# ----------------------------------------------------------------------- programs in operations

HIGH = "call_hi_primitive"
"""An operation that is a class: JAX has it since 0.10, and makes `searchsorted` one since 0.11."""


def kind_of(equation: Any) -> str:
    """Return the name of an operation; of one that is a class, the name of the class."""
    name = str(equation.primitive.name)
    return type(parameters(equation)["_prim"]).__name__ if name == HIGH else name


def expanded(equation: Any) -> ClosedJaxpr:
    """Return the program that an operation that is a class stands for, as JAX compiles it."""
    primitive, params = equation.primitive, dict(equation.params)
    try:
        program: Callable[..., Any] = primitive.to_lojax
    except AttributeError as error:
        raise _unknown(kind_of(equation), "cannot be expanded") from error
    shapes = [operand.aval for operand in equation.invars]
    return jax.make_jaxpr(lambda *values: program(*values, **params))(*shapes)


def plain_parameters(equation: Any) -> dict[str, Any]:
    """Return the parameters of an operation by values that other processes can compare."""
    params = dict(equation.params)
    if equation.primitive.name == "scan":
        params["counts"] = scan_counts(equation)
    elif equation.primitive.name == HIGH:
        params = {"class": kind_of(equation), **parameters(equation)["_prim"].params}
    return params


def is_high(value: Any) -> bool:
    """Return whether a parameter is the class of an operation."""
    return hasattr(value, "expand") and hasattr(value, "in_tree")


def programs_of(equation: Any) -> Iterator[Any]:
    """Yield the programs that an operation runs."""
    if equation.primitive.name == HIGH:
        yield expanded(equation).jaxpr
        return
    for parameter in equation.params.values():
        for part in parameter if isinstance(parameter, list | tuple) else [parameter]:
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield inner


def names_of_arguments(program: Any) -> Any:
    """Return the debugging information of a program, for one with other arguments."""
    info = getattr(program, "jaxpr", program).debug_info
    return getattr(info, "with_unknown_names", lambda: info)()  # JAX 0.7 has none
