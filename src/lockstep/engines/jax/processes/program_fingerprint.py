"""Checks that several processes trace the same step, with the same constants.

A value that is no variable (an activation, a momentum, the bins of a layer) is only in the program.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from lockstep.engines.jax.jax_compat import plain_parameters
from lockstep.engines.jax.processes.jax_group import GROUP
from lockstep.errors import ProcessesDisagree
from lockstep.processes.coordination import digest, once


def check_same(traced: Any) -> None:
    """Check that all processes have traced the same program. Every process calls this.

    Raises:
        ProcessesDisagree: If the programs differ.
    """
    least, greatest = once([digest(_parts(traced.jaxpr)), jax.process_index()])
    if least[0] != greatest[0]:
        first, other = sorted([least[1], greatest[1]])
        raise ProcessesDisagree(
            f"Process {other} would run a different step than process {first}: something other "
            "than a variable differs (an activation, a loss, a momentum, a constant of a "
            "layer).\nBuild and compile the model with the same code in every process, and seed "
            "all random numbers."
        )


def _parts(program: Any) -> Iterator[bytes]:
    # Not the program's text: its files and addresses differ between processes.
    for constant in getattr(program, "consts", ()):
        yield _numbers(constant)
    program = getattr(program, "jaxpr", program)
    known: dict[Any, int] = {}  # numbers the values, as a - b is not b - a

    def place(value: Any) -> str:
        number = known.setdefault(value, len(known))
        return f"{number}:{_kind(value)}"

    for value in (*program.constvars, *program.invars):
        yield place(value).encode()
    for equation in program.eqns:
        yield equation.primitive.name.encode()
        for into in equation.invars:
            literal = isinstance(into, jax.extend.core.Literal)
            yield _kind(into).encode() + _numbers(into.val) if literal else place(into).encode()
        yield ",".join(map(place, equation.outvars)).encode()
        for name, value in sorted(plain_parameters(equation).items()):
            yield f"{name}={'' if name in _SAYS_NOTHING else _said(value)}".encode()
            for inner in value if isinstance(value, list | tuple) else [value]:
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from _parts(inner)
    for value in program.outvars:
        literal = isinstance(value, jax.extend.core.Literal)
        yield _numbers(value.val) if literal else place(value).encode()


_SAYS_NOTHING = ("name",)
"""The name of a function. It may differ between processes that run the same program."""


def _kind(value: Any) -> str:
    shape, dtype = getattr(value.aval, "shape", ()), getattr(value.aval, "dtype", "")
    return f"{dtype}{shape}"


def _said(value: Any) -> str:
    """Return the value of an operation's parameter, without anything local to this process."""
    if isinstance(value, jax.extend.core.Primitive):
        return str(value.name)
    if isinstance(value, int | float | complex | str | bytes | np.dtype | Enum | None):
        return repr(value)
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype}{value.shape}{value.tobytes()!r}"
    if isinstance(value, Mapping):
        return repr(sorted((str(name), _said(each)) for name, each in value.items()))
    if isinstance(value, list | tuple):
        return f"({','.join(map(_said, value))})"
    return ""


def _numbers(value: Any) -> bytes:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return b""  # random keys have no NumPy dtype
    return np.asarray(GROUP.local(value)).tobytes()
