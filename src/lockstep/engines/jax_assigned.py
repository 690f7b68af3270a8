"""What is assigned to variables between steps, and whether every process does.

A step leaves the same values in every process. What a script or a callback assigns since, it
has to assign in all of them: the copies of a variable would otherwise stay apart for good.
"""

import weakref
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.engines import jax_processes
from lockstep.engines.jax_exchange import Exchange

_BYTES = 1 << 16
"""Of a larger array so many bytes are compared, from all over it."""


class Assigned:
    """What one process has assigned to the variables of one model.

    Args:
        variables: Gives the variables, in the same order in every process.

    Attributes:
        check: A checksum of all that was assigned since the processes were last found alike.
    """

    def __init__(self, variables: Callable[[], list[Any]]) -> None:
        self.check = 0
        self._variables = variables
        self._exchange = Exchange()
        self._known: dict[int, weakref.ref[Any]] = {}

    def left(self, arrays: list[Any]) -> None:
        """A step has left these arrays in variables, in every process."""
        left = {id(array) for array in arrays}
        for variable in self._variables():
            if id(variable.value) in left:
                self._know(variable)

    def note(self) -> None:
        """Take notice of what was assigned; not while a step has the arrays of the variables."""
        for position, variable in enumerate(self._variables()):
            known = self._known.get(id(variable))
            # No array ever changes: as long as it is the same one, so are its numbers.
            if known is None or known() is not variable.value:
                value = np.asarray(jax_processes.local(variable.value))
                of = repr((position, value.shape, str(value.dtype))).encode()
                self.check = zlib.crc32(sample(value).tobytes(), zlib.crc32(of, self.check))
                self._know(variable)

    def share(self) -> None:
        """Give every process what the first one has, where another one has assigned other values.

        Raises:
            ProcessesDisagree: If a process has left the call.
        """
        self.note()
        least, greatest = self._exchange.say([self.check])
        if least != greatest:
            jax_processes.share_variables(self._variables())
            for variable in self._variables():
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
