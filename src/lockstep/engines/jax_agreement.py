"""Whether several processes train on the same rows, and on as many batches."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from lockstep.engines.jax_exchange import Exchange, Word
from lockstep.errors import ProcessesDisagree

_BYTES = 1 << 16
"""Of an array of a later batch so many bytes are compared, from all over it."""

_GOES_ON, _ENDED, _COMPARES, _DONE, _LEFT = range(5)
"""What a process does: takes batches, finds no more, compares those of an epoch, has no epoch
left, leaves by an error.

A word is one of these, how many batches the process has taken, a checksum, and its number.
"""

Pull = Callable[[], list[Any]]


class Seen:
    """The batches that a process has taken, beside those of the others.

    Which rows they have is compared once, at the end of the epoch.

    Args:
        every_pull: Whether a pull may end earlier here than in another process, or fail. All
            have to take part in a step, so they agree before each that they can.
    """

    def __init__(self, every_pull: bool) -> None:
        self._exchange = Exchange()
        self._every_pull = every_pull
        self._taken = 0
        self._check = 0
        self._first = True

    def each(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, noted."""
        self._first = True
        for batch in batches:
            self._taken += 1
            for array in _arrays(batch):
                self._check = _added(_sample(array), array, self._check)
            yield batch

    def agreed(self, pull: Pull, batches: int | None) -> list[Any]:
        """What `pull` gives, where all processes have as many batches to go on with.

        Args:
            pull: Takes the batches of one execution out of `each`.
            batches: How many the epoch has, `None` where that is not known.

        Raises:
            ProcessesDisagree: If they have not; or other rows, in the first batch.
        """
        try:
            found = pull()
        except StopIteration:
            self._say(_ENDED, 0)
            raise
        except BaseException:
            self.leave()
            raise
        if self._first or self._every_pull:
            check = _first_rows(found[0], batches) if self._first else 0
            self._first = False
            self._say(_GOES_ON, check)
        return found

    def leave(self) -> None:
        """Tell the others that this process takes part in no more steps."""
        self._exchange.leave(self._word(_LEFT, 0))

    def check(self) -> None:
        """Raise where another process has taken other batches; begin anew.

        Raises:
            ProcessesDisagree: If that is so.
        """
        self._say(_COMPARES, self._check)
        self._check = self._taken = 0
        self.close()

    def done(self) -> None:
        """Return when no process goes on with another epoch.

        Raises:
            ProcessesDisagree: If one does.
        """
        self._say(_DONE, 0)

    def close(self) -> None:
        """Nothing more is compared for some time."""
        self._exchange.close()

    def _word(self, does: int, check: int) -> Word:
        return [does, self._taken, check, jax.process_index()]

    def _say(self, does: int, check: int) -> None:
        _compare(*self._exchange.say(self._word(does, check)))


def _compare(least: Word, greatest: Word) -> None:
    """Raise where these two words of two processes differ in anything but the process."""
    if least[:3] == greatest[:3]:
        return
    first, other = sorted([least[3], greatest[3]])
    (fewer, taken), (more, _) = [
        (process, count)
        for _, count, _, process in sorted([least, greatest], key=lambda word: (word[1], -word[0]))
    ]
    if greatest[0] == _LEFT:
        raise ProcessesDisagree(
            f"Process {greatest[3]} left after {greatest[1]} batches, by an error or an interrupt, "
            f"and process {least[3]} goes on: a step needs every process.\n"
            f"See what process {greatest[3]} says; the weights here are those after the last step "
            "of all."
        )
    if greatest[0] == _DONE:
        raise ProcessesDisagree(
            f"Process {greatest[3]} has no epoch left, and process {least[3]} goes on with another "
            "one: a step needs every process.\n"
            "Let every process stop after the same epoch (by the logs, say, and not by a clock).\n"
            "The weights are those after the last step of all."
        )
    if least[0] == greatest[0] == _COMPARES:
        raise ProcessesDisagree(
            f"Among the {taken} batches of this epoch, process {other} had another one than "
            f"process {first}: what was trained is not what one device gives.\n"
            "Give every process the same data in the same order (seed what draws it), and go "
            "back to a file of the epoch before."
        )
    if least[:2] == greatest[:2]:
        raise ProcessesDisagree(
            f"Process {other} has another first batch, or another number of batches, than "
            f"process {first}: rows would be lost or trained on twice.\n"
            "Give every process the same data in the same order (seed what draws the order), and "
            "the global batch size:\neach process places the rows of its own devices."
        )
    raise ProcessesDisagree(
        f"Process {fewer} ends after {taken} batches, and process {more} goes on: a step needs "
        "every process.\n"
        "Give every process the same data; steps_per_epoch ends an epoch alike where some have "
        "more.\nThe weights are those after the last step of all."
    )


def _first_rows(batch: Any, batches: int | None) -> int:
    check = zlib.crc32(repr(batches).encode())
    for array in _arrays(batch):
        check = _added(array[: 1 << 10], array, check)
    return check


def _arrays(batch: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in keras.tree.flatten(batch) if leaf is not None]


def _added(part: np.ndarray, array: np.ndarray, check: int) -> int:
    check = zlib.crc32(repr((array.shape, str(array.dtype))).encode(), check)
    if part.dtype.hasobject:  # which no device takes
        return check
    return zlib.crc32(part.tobytes(), check)


def _sample(array: np.ndarray) -> np.ndarray:
    if array.nbytes <= _BYTES:
        return array
    flat = array.reshape(-1)
    step = -(-array.nbytes // _BYTES)
    # An odd distance meets other columns in every row, where their number is a power of two.
    return flat[:: step | 1]
