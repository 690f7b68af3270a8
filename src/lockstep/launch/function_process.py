"""A function in a fresh Python: packed by the caller, called here, its value or error sent back.

python -m lockstep.launch.function_process FUNCTION RESULT
"""

import contextlib
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import LaunchError
from lockstep.launch.environment import PROCESS


def pack(function: Callable[[], object]) -> bytes:
    """Return a function as bytes; one of a script or a notebook by value.

    Raises:
        LaunchError: If it cannot be pickled.
    """
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps(function)
    except Exception as error:
        raise LaunchError(
            f"{function!r} was to run on the nodes, and it cannot be pickled: {error}.\n"
            "Let the function make such objects itself."
        ) from error
    return packed


def call(function_file: Path, result_file: Path) -> None:
    """Call the packed function. Process 0 writes its value, and any process its error."""
    import cloudpickle

    function = pickle.loads(function_file.read_bytes())
    try:
        value = function()
        if int(os.environ.get(PROCESS, 0)) == 0:
            result_file.write_bytes(cloudpickle.dumps((True, value)))
    except BaseException as error:
        with contextlib.suppress(Exception):
            result_file.write_bytes(cloudpickle.dumps((False, error)))
        raise


def unpack(result: bytes | None) -> tuple[bool, Any]:
    """Return whether the function has returned, and its value or its error."""
    if result is None:
        return False, None
    try:
        returned, value = pickle.loads(result)
    except Exception as error:
        return False, error
    return returned, value


if __name__ == "__main__":
    call(*map(Path, sys.argv[1:]))
