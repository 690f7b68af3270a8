"""What is assigned to variables between steps, and whether every process does.

A step leaves the same values in every process. What a script or a callback assigns since, it
has to assign in all of them: the copies of a variable would otherwise stay apart for good.
"""

import weakref
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.engines.jax.outside import every_variable
from lockstep.engines.jax.several import processes
from lockstep.engines.jax.several.constants import constants_of
from lockstep.engines.jax.several.exchange import once

_BYTES = 1 << 16
"""Of a larger array so many bytes are compared, from all over it."""


class Assigned:
    """What one process has assigned to the variables of one model.

    Args:
        model: The model.
        held: Gives those of its variables that every process has been given the values of. After
            an error in one process, another one may have built more.

    Attributes:
        check: A checksum of all that was assigned since the processes were last found alike.
    """

    def __init__(self, model: Any, held: Callable[[], list[Any]]) -> None:
        self.check = 0
        self._model = model
        self._held = held
        self._known: dict[int, weakref.ref[Any]] = {}

    def left(self, arrays: list[Any]) -> None:
        """A step has left these arrays in variables, in every process."""
        left = {id(array) for array in arrays}
        for variable in every_variable(self._model):
            if id(variable.value) in left:
                self._know(variable)

    def note(self, whole: bool = False) -> None:
        """Take notice of what was assigned; not while a step has the arrays of the variables.

        Args:
            whole: Whether of large arrays every number is compared.
        """
        for position, variable in enumerate(every_variable(self._model)):
            known = self._known.get(id(variable))
            # No array ever changes: as long as it is the same one, so are its numbers.
            if known is None or known() is not variable.value:
                value = np.asarray(processes.local(variable.value))
                of = repr((position, value.shape, str(value.dtype))).encode()
                part = np.ascontiguousarray(value if whole else sample(value))
                numbers = part.reshape(-1).view("uint8").data
                self.check = zlib.crc32(numbers, zlib.crc32(of, self.check))
                self._know(variable)

    def share(self) -> None:
        """Give every process what the first one has, where another one has assigned other values.

        Every number is compared of what was assigned since the last step.

        Raises:
            ProcessesDisagree: If a process has left the call, or has other variables.
        """
        self.note(whole=True)
        constants = constants_of(self._model)
        fixed = [np.asarray(constant.value).tobytes() for constant in constants]
        # An exchange of this call alone: where one before broke off, a word of it may still stand.
        least, greatest = once([self.check, zlib.crc32(b"".join(fixed))])
        if least != greatest:
            held = self._held()
            processes.share_variables([*held, *constants])
            for variable in held:
                self._know(variable)
        self.check = 0

    def _know(self, variable: Any) -> None:
        self._known[id(variable)] = weakref.ref(variable.value)


def sample(array: np.ndarray) -> np.ndarray:
    """The array, or numbers from all over a large one."""
    if array.nbytes <= _BYTES:
        return array
    flat = array.reshape(-1)
    step = -(-array.nbytes // _BYTES)
    # An odd distance meets other columns in every row, where their number is a power of two.
    return flat[:: step | 1]
