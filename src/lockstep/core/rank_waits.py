"""What each rank of a pool waits for, in memory that all of them read.

Ranks that wait in different exchanges would wait for ever: gloo and the pipes have no limit, since
a step may take any time.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

NOTHING, CALL, ANSWER, RESULTS, GATHER, SUM, BROADCAST, COMPARE = range(8)

_IN_WORDS = {
    CALL: "for its next call",
    ANSWER: "for an answer",
    RESULTS: "for the results of its step",
    GATHER: "to gather {} bytes",
    SUM: "to sum {} bytes",
    BROADCAST: "to broadcast {} bytes",
    COMPARE: "to compare its next collective",
}
_EACH = 3
"""Numbers of one rank: how often it has waited, for what, and the bytes of an exchange."""


class Waits:
    """Notes what the ranks wait for.

    Args:
        file: The descriptor of a file in memory, which all ranks have.
        rank: The number of this rank.
        size: The number of ranks.
    """

    def __init__(self, file: int, rank: int, size: int) -> None:
        if not rank:
            os.ftruncate(file, 8 * _EACH * size)
        self._numbers = memoryview(mmap.mmap(file, 8 * _EACH * size)).cast("q")
        self._mine = _EACH * rank

    @contextmanager
    def waiting(self, what: int, size: int = 0) -> Iterator[None]:
        """Note inside the context that this rank waits.

        Args:
            what: What it waits for.
            size: The bytes of an exchange.
        """
        numbers, mine = self._numbers, self._mine
        numbers[mine] += 1
        numbers[mine + 2] = size
        numbers[mine + 1] = what
        try:
            yield
        finally:
            numbers[mine + 1] = NOTHING

    def every(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of each rank."""
        found = self._numbers.tolist()
        return tuple(tuple(found[at : at + _EACH]) for at in range(0, len(found), _EACH))


def parted(every: tuple[tuple[int, ...], ...]) -> tuple[str, int, str] | None:
    """Return for what ranks wait that cannot go on, `None` if one works or all wait for the same.

    Args:
        every: What `Waits.every` has returned.

    Returns:
        What the first device waits for, the number of another one, and what that waits for.

    Example:
        >>> parted(((7, GATHER, 48), (5, CALL, 0)))
        ('to gather 48 bytes', 1, 'for its next call')
        >>> parted(((7, GATHER, 48), (5, GATHER, 48)))
        >>> parted(((7, GATHER, 48), (5, NOTHING, 0)))
    """
    if any(what == NOTHING for _, what, _ in every):
        return None
    (_, *first), *others = every
    for rank, (_, *other) in enumerate(others, 1):
        if other != first:
            one, another = (_IN_WORDS[what].format(size) for what, size in (first, other))
            return one, rank, another
    return None
