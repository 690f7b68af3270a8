"""Where an operation of a traced program comes from: its layer and its line."""

import re
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib
import keras

from lockstep.engines.jax.jax_compat import REPEATED_TRACE, kind_of, parameters
from lockstep.engines.jax.rowtrace.row_labels import Place

_FRAMEWORKS = (Path(jax.__file__).parent, Path(jaxlib.__file__).parent, Path(keras.__file__).parent)
_LOCKSTEP = Path(__file__).parents[3]
_STANDARD = Path(sysconfig.get_path("stdlib"))


def place_of(equation: Any, caller: Place) -> Place:
    """Return the layer, the name and the user's line of an operation.

    Args:
        equation: The operation.
        caller: The operation that calls its program. Its line counts if the operation has none.
    """
    scopes = str(equation.source_info.name_stack)
    # Transformations, as in "transpose(jvp(layer))", are not part of the path.
    parts = re.sub(r"\w+\(|\)", "", scopes).split("/")
    # jax.numpy.einsum has a scope of its subscripts.
    layer = "/".join(part for part in (caller.layer, *parts) if part and "->" not in part)
    return Place(layer, _name(equation), _line(equation) or caller.line)


def is_of_frameworks(function: Any) -> bool:
    """Return whether a function that was traced is code of JAX, Keras or lockstep.

    Args:
        function: Its program, or what JAX has wrapped it in.
    """
    return any(map(_file(function).is_relative_to, (*_FRAMEWORKS, _LOCKSTEP)))


def wraps_any_function(program: Any) -> bool:
    """Return whether a program is what `jax.custom_gradient` makes of any function."""
    return _file(program).name == "custom_derivatives.py"


def _file(function: Any) -> Path:
    """Return the file of a function that was traced; an empty path if JAX does not know it."""
    info = getattr(getattr(function, "jaxpr", function), "debug_info", None)
    where = str(getattr(info, "func_src_info", "")).partition(" at ")[2]
    return Path(where.rpartition(":")[0])


def _name(equation: Any) -> str:
    """Return the name of a primitive, or of a function that has a gradient of its own."""
    params = parameters(equation)
    for key in ("call_jaxpr", "fun_jaxpr") if equation.primitive.name.startswith("custom_") else ():
        if key in params:
            info = params[key].jaxpr.debug_info
            return str(info.func_src_info).partition(" at ")[0]
    return kind_of(equation)


def _line(equation: Any) -> str:
    """Return the innermost line that is not in a framework; empty if that is lockstep's."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if frame.function_name.endswith(REPEATED_TRACE):
            break  # JAX keeps the trace of such a function, with the line that called it first
        if not _is_framework(frame.file_name):
            path = Path(frame.file_name)
            return "" if path.is_relative_to(_LOCKSTEP) else f"{path.name}:{frame.line_num}"
    return ""


@cache
def _is_framework(file: str) -> bool:
    path = Path(file)
    if path.is_relative_to(_STANDARD) and "site-packages" not in path.parts:
        return True
    return any(map(path.is_relative_to, _FRAMEWORKS)) or not path.is_absolute()
