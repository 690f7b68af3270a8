"""Detects assignments to variables between steps that differ between processes.

A step leaves the same values in every process. A later assignment has to be made in all processes:
otherwise the copies of a variable stay different.
"""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.core.state import variables_of
from lockstep.processes import process_group
from lockstep.processes.coordination import digest, once
from lockstep.processes.group import current
from lockstep.processes.normalization_constants import constants_of

_BYTES = 1 << 16
"""The number of bytes compared of a larger array, sampled from all over it."""


class VariableDrift:
    """Track the values that one process assigns to the variables of one model.

    Args:
        model: The model.
        held: Returns the variables whose values every process has been given. After an error in one
            process, another process may have built more variables.

    Attributes:
        digest: A hash of all assignments since the processes were last found equal.
    """

    def __init__(self, model: Any, held: Callable[[], list[Any]]) -> None:
        self.digest = ""
        self._model = model
        self._held = held
        self._known: dict[int, tuple[weakref.ref[Any], object]] = {}

    def left(self, arrays: list[Any]) -> None:
        """Record arrays that a step left in variables, in every process."""
        left = {id(array) for array in arrays}
        for variable in variables_of(self._model):
            if not current().has_part(variable) and id(variable.value) in left:
                self._know(variable)

    def note(self, whole: bool = False) -> None:
        """Record new assignments. Not called while a step holds the arrays of the variables.

        Args:
            whole: Whether large arrays are compared in full.
        """
        for position, variable in enumerate(variables_of(self._model)):
            array, version = self._known.get(id(variable), (None, None))
            if current().has_part(variable):  # the processes agree in each assignment
                continue
            # The same array of one version has the same values.
            if array is None or array() is not variable.value or version != _version(array()):
                value = current().to_host(variable.value)
                of = repr((position, value.shape, str(value.dtype))).encode()
                part = np.ascontiguousarray(value if whole else sample(value))
                numbers = part.reshape(-1).view("uint8").data
                self.digest = digest([self.digest.encode(), of, numbers])
                self._know(variable)

    def share(self) -> None:
        """Give every process the values of the first one, if any assignments differ.

        All values assigned since the last step are compared in full.

        Raises:
            ProcessesDisagree: If a process has left the call, or has other variables.
        """
        self.note(whole=True)
        constants = constants_of(self._model)
        fixed = [current().to_host(constant.value).tobytes() for constant in constants]
        # A separate exchange: an old word may remain where an earlier exchange failed.
        least, greatest = once([self.digest, digest(fixed)])
        if least != greatest:
            held = self._held()
            process_group.share_variables([*held, *constants])
            for variable in held:
                self._know(variable)
        self.digest = ""

    def _know(self, variable: Any) -> None:
        self._known[id(variable)] = weakref.ref(variable.value), _version(variable.value)


def _version(array: Any) -> object:
    """Return a number that changes with the values of a tensor of PyTorch; others never change."""
    return getattr(array, "_version", None)


def sample(array: np.ndarray) -> np.ndarray:
    """Return the array, or a sample from all over a large one."""
    if array.nbytes <= _BYTES:
        return array
    flat = array.reshape(-1)
    step = -(-array.nbytes // _BYTES)
    # An odd stride visits other columns in every row, if their number is a power of two.
    return flat[:: step | 1]
