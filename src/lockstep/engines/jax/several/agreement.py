"""Whether several processes train on the same rows, and on as many batches."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from lockstep.engines.jax.several.assigned import Assigned, sample
from lockstep.engines.jax.several.exchange import Exchange, Word, once
from lockstep.engines.jax.several.processes import local_array
from lockstep.engines.recording import Recorder
from lockstep.errors import ProcessesDisagree

_BEGINS, _GOES_ON, _ENDED, _COMPARES = range(4)
"""What a process does: takes first batches, takes more, finds no more, compares an epoch's.

A word is one of these, how many batches the process has taken, a checksum of them, one of what
was assigned to variables, whether it is watched, and the number of the process.
"""

Pull = Callable[[], list[Any]]


class Seen:
    """The batches that a process has taken, beside those of the others.

    Which rows they have is compared once, at the end of the epoch.

    Args:
        every_pull: Whether a pull may end earlier here than in another process, or fail. All
            have to take part in a step, so they agree before each that they can.

    Attributes:
        watched: Whether callbacks come between the steps of this process, any of which may stop
            or fail. Where those of any process do, all agree before each step.
    """

    def __init__(self, every_pull: bool) -> None:
        self.every_pull = every_pull
        self.watched = False
        self._exchange = Exchange()
        self._assigned: Assigned | None = None
        self._taken = 0
        self._check = 0
        self._first = True

    def each(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, noted."""
        self._first = True
        for batch in batches:
            self._taken += 1
            for array in _arrays(batch):
                self._check = _added(sample(array), array, self._check)
            yield batch

    def agreed(self, pull: Pull, rows: object, assigned: Assigned | None = None) -> list[Any]:
        """What `pull` gives, where all processes have as many batches to go on with.

        Args:
            pull: Takes the batches of one execution out of `each`.
            rows: How many batches and rows the epoch has, as far as that is known.
            assigned: What was assigned to the variables that these batches train.

        Raises:
            ProcessesDisagree: If they have not; or other rows, in the first batch; or have
                assigned something else.
        """
        self._assigned = assigned
        try:
            found = pull()
        except StopIteration:
            self._say(_ENDED, 0)
            raise
        if self._first:
            self._first = False
            # Not those that were taken before: after an error, what one process has built already
            # another one may have yet to build on a batch.
            greatest = self._say(_BEGINS, _first_rows(found[0], rows), len(found))
            self.every_pull |= bool(greatest[4])
        elif self.every_pull:  # of other shapes, the processes would run other programs
            self._say(_GOES_ON, _shapes(found))
        return found

    def check(self) -> None:
        """Raise where another process has taken other batches; begin anew.

        Raises:
            ProcessesDisagree: If that is so.
        """
        self._say(_COMPARES, self._check)
        self._check = self._taken = 0
        self.close()

    def close(self) -> None:
        """Nothing more is compared for some time."""
        self._exchange.close()

    def _say(self, does: int, check: int, taken: int | None = None) -> Word:
        assigned = 0 if self._assigned is None else self._assigned.check
        taken = self._taken if taken is None else taken
        word = [does, taken, check, assigned, self.watched, jax.process_index()]
        least, greatest = self._exchange.say(word)
        _compare(least, greatest)
        return greatest


def check_course(given: dict[str, Any]) -> None:
    """Raise where the processes would not come to the same places of a `fit`.

    Args:
        given: What `fit` is called with, by name.

    Raises:
        ProcessesDisagree: If that is so.
    """
    validates = given.get("validation_data") is not None or bool(given.get("validation_split"))
    often = zlib.crc32(repr(given.get("validation_freq", 1)).encode()) if validates else 0
    callbacks = keras.tree.flatten(given.get("callbacks"))
    saves = any(isinstance(each, Recorder) for each in callbacks)
    least, greatest = once([validates, saves, often, jax.process_index()])
    without, has = least[3], greatest[3]
    for what, one, other in zip(_GIVEN, least, greatest, strict=False):
        if one != other:
            raise ProcessesDisagree(
                f"Process {has} was given {what} for its fit, and process {without} none: they "
                "would wait for\none another for ever. Give every process the same."
            )
    if least[2] != greatest[2]:
        raise ProcessesDisagree(
            f"Process {has} was given another validation_freq than process {without}: they would "
            "wait for\none another for ever. Give every process the same."
        )


_GIVEN = ("validation data", "a lockstep.Checkpoint")


def _compare(least: Word, greatest: Word) -> None:
    """Raise where these two words of two processes differ in what they do."""
    if least[:4] == greatest[:4]:
        return
    first, other = sorted([least[-1], greatest[-1]])
    # One that begins anew counts from there, so that who has ended comes first, whatever it took.
    (_, taken, *_, fewer), (*_, more) = sorted(
        [least, greatest], key=lambda word: (word[0] != _ENDED, word[1], -word[0])
    )
    if least[:3] == greatest[:3]:
        raise ProcessesDisagree(
            f"Process {other} has assigned other values to variables than process {first}, or at "
            "another time: their copies would stay apart.\n"
            "Let every process assign alike (a learning rate, weights out of a file that all of "
            "them see),\nand go back to a file of before."
        )
    if least[0] == greatest[0] == _COMPARES:
        raise ProcessesDisagree(
            f"Among the {taken} batches of this epoch, process {other} had another one than "
            f"process {first}: what was trained is not what one device gives.\n"
            "Give every process the same data in the same order (seed what draws it), and go "
            "back to a file of the epoch before."
        )
    if least[:2] == greatest[:2] and least[0] == _GOES_ON:
        raise ProcessesDisagree(
            f"Process {other} has other shapes or types in batch {taken} of its epoch, or one "
            f"before, than process {first}: they would run different programs.\n"
            "Give every process the same data in the same order (seed what draws it)."
        )
    if least[:2] == greatest[:2]:
        raise ProcessesDisagree(
            f"Process {other} has another first batch, or another number of batches or rows, than "
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


def _first_rows(batch: Any, rows: object) -> int:
    check = zlib.crc32(repr(rows).encode())
    for array in _arrays(batch):
        check = _added(np.atleast_1d(array)[: 1 << 10], array, check)
    return check


def _shapes(batches: list[Any]) -> int:
    return zlib.crc32(repr([_kind(array) for array in _arrays(batches)]).encode())


def _arrays(batch: Any) -> list[np.ndarray]:
    return [local_array(leaf) for leaf in keras.tree.flatten(batch) if leaf is not None]


def _added(part: np.ndarray, array: np.ndarray, check: int) -> int:
    check = zlib.crc32(repr(_kind(array)).encode(), check)
    if part.dtype.hasobject:  # which no device takes
        return check
    return zlib.crc32(part.tobytes(), check)


def _kind(array: np.ndarray) -> tuple[tuple[int, ...], str]:
    return array.shape, str(array.dtype)
