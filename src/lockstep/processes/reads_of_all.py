"""Reads of variables of which each of several processes has a part: all of them take part."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.errors import ProcessesDisagree
from lockstep.processes.coordination import once
from lockstep.processes.group import current

_FOLLOWS = -1
"""Sent in place of a number: a process reads what the first one reads, which ends with it."""


def agree_on_variable(number: int, does: str = "reads") -> None:
    """Return once every process reads the same variable, or follows the first one.

    Args:
        number: The number of the variable among those of which each process has a part.
        does: What the processes do with it.

    Raises:
        ProcessesDisagree: If another process reads another variable, or does not answer.
    """
    least, greatest = _agreed(number, does)
    if not {least, greatest} <= {number, _FOLLOWS}:
        raise ProcessesDisagree(
            "Two processes read different sharded variables.\n"
            "Read the same variables in the same order in every process."
        )


def _agreed(number: int, does: str = "reads") -> tuple[int, int]:
    """Return the least and the greatest number that a process reads.

    In the gather itself, a process alone would wait without an end.

    Raises:
        ProcessesDisagree: If another process does not answer.
    """
    try:
        (least,), (greatest,) = once([number], kind=f"-{does}")
    except ProcessesDisagree as error:
        if error.left_by is not None:
            raise
        raise ProcessesDisagree(
            f"Process {current().rank} {does} a sharded variable, but another process does "
            "not.\nDo this, or save the model, in every process at the same point of the "
            "script.\nLOCKSTEP_PATIENCE sets how many seconds a process waits for the others."
        ) from error
    return least, greatest


class ReadsOfFirst:
    """The variables in parts of a model that the first of several processes writes to a file.

    Args:
        variables: Returns the variables by their numbers.
        gather: Takes part in the gather of one.
    """

    def __init__(self, variables: Callable[[], Any], gather: Callable[[Any], object]) -> None:
        self._variables = variables
        self._gather = gather

    @contextmanager
    def read_with_all(self) -> Iterator[None]:
        """Let the other processes follow what this process reads inside the context."""
        try:
            yield
        except ProcessesDisagree:
            raise  # they do not follow
        except BaseException:
            _agreed(_FOLLOWS)
            raise
        _agreed(_FOLLOWS)

    def follow(self) -> None:
        """Take part in what the first process reads, until it ends."""
        variables = self._variables()
        while True:
            _, number = _agreed(_FOLLOWS)
            if number == _FOLLOWS:
                return
            self._gather(variables[number])
