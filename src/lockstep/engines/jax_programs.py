"""Whether several processes have traced the same step, with the same constants in it.

What is no variable (an activation, a momentum, the bins of a layer) is in the program alone.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from lockstep.engines import jax_processes
from lockstep.engines.jax_exchange import once
from lockstep.errors import ProcessesDisagree


def check_same(traced: Any) -> None:
    """Raise where another process has traced another program; every process calls this.

    Raises:
        ProcessesDisagree: If that is so.
    """
    check = 0
    for part in _parts(traced.jaxpr):
        check = zlib.crc32(part, check)
    least, greatest = once([check, jax.process_index()])
    if least[0] != greatest[0]:
        first, other = sorted([least[1], greatest[1]])
        raise ProcessesDisagree(
            f"Process {other} would run another step than process {first}: something that "
            "is no variable differs (an activation, a loss, a momentum, a constant of a layer).\n"
            "Let one function build and compile the model alike in every process, and seed what it "
            "draws."
        )


def _parts(program: Any) -> Iterator[bytes]:
    # No text of the program: it tells of files and addresses too, which differ by process.
    for constant in getattr(program, "consts", ()):
        yield _numbers(constant)
    for equation in getattr(program, "jaxpr", program).eqns:
        shapes = [getattr(out.aval, "shape", ()) for out in equation.outvars]
        plain = [(name, value) for name, value in equation.params.items() if _is_plain(value)]
        yield repr((equation.primitive.name, shapes, sorted(plain))).encode()
        for into in equation.invars:
            if isinstance(into, jax.extend.core.Literal):
                yield _numbers(into.val)
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from _parts(inner)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float)


def _numbers(value: Any) -> bytes:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return b""  # keys of random numbers, which NumPy does not know
    return np.asarray(jax_processes.local(value)).tobytes()
