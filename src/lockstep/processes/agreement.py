"""Checks that several processes train on the same rows and the same number of batches."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from lockstep.errors import ProcessesDisagree, counted
from lockstep.processes.call_scope import CALLS
from lockstep.processes.coordination import Word, WordExchange, digest, once
from lockstep.processes.group import current
from lockstep.processes.variable_drift import VariableDrift, sample

_BEGINS, _GOES_ON, _ENDED, _COMPARES, _WHOLE = range(5)
"""The actions of a process: take first batches, take more, find none left, compare an epoch, or
compare batches with all of their rows.

A word has an action, the number of batches taken, a hash of them, a hash of the assignments to
variables, whether the process is watched, and the number of the process.
"""

Pull = Callable[[], list[Any]]


class DataCheck:
    """Compare the batches of this process with those of the others.

    The rows are compared once, at the end of the epoch.

    Args:
        every_pull: Whether a pull may end earlier in this process than in another, or fail. All
            processes take part in a step, so they agree before each step.
        whole: Whether all rows of each pull are compared before its step. No end of an epoch is
            known then, as in `train_on_batch`, or in a loop of Keras.

    Attributes:
        watched: Whether callbacks run between the steps of this process. They may stop or fail. If
            any process is watched, all processes agree before each step.
        is_joined: Whether the batches were joined from the rows of all processes, and need no
            comparison.
    """

    def __init__(self, every_pull: bool, *, whole: bool = False) -> None:
        self.every_pull = every_pull
        self._whole = whole
        self.watched = False
        self.is_joined = False
        self._exchange = WordExchange()
        self._assigned: VariableDrift | None = None
        self._taken = 0
        self._hash = _new_hash()
        self._first = True

    def each(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the same batches, and record them."""
        self._first = True
        if self._whole:
            self._hash = _new_hash()
        for batch in batches:
            self._taken += 1
            for array in () if self.is_joined else _arrays(batch):
                _add(self._hash, array if self._whole else sample(array), array)
            yield batch

    def agreed(
        self,
        pull: Pull,
        rows: object,
        assigned: VariableDrift | None = None,
        steps: int | None = None,
    ) -> list[Any]:
        """Return the result of `pull`, once all processes have as many batches.

        Args:
            pull: Takes the batches of one execution out of `each`.
            rows: The number of batches and rows of the epoch, as far as known.
            assigned: The values assigned to the variables that these batches train.
            steps: The number of steps that the user has given, as `steps_per_epoch`.

        Raises:
            ProcessesDisagree: If the numbers of batches, the assigned values, or the rows of the
                first batch differ; with `whole`, those of any batch.
        """
        self._assigned = assigned
        try:
            found = pull()
        except StopIteration:
            self._exchange_word(_ENDED, "")
            raise
        if self._whole:
            self._exchange_word(_WHOLE, self._hash.hexdigest(), len(found))
        elif self._first:
            self._first = False
            # Earlier batches do not count. After an error one process may have a built model, while
            # another process draws a batch to build its model.
            seen = "" if self.is_joined else _first_rows(found[0], rows)
            greatest = self._exchange_word(_BEGINS, f"{steps} {seen}", len(found))
            self.every_pull |= bool(greatest[4])
        elif self.every_pull:  # with other shapes they would run other programs
            self._exchange_word(_GOES_ON, "" if self.is_joined else _shapes(found))
        return found

    def check(self) -> None:
        """Compare the batches of the epoch with those of the other processes, then start anew.

        Raises:
            ProcessesDisagree: If another process has taken other batches.
        """
        self._exchange_word(_COMPARES, self._hash.hexdigest())
        self._taken, self._hash = 0, _new_hash()
        self.close()

    def close(self) -> None:
        """Release the exchange: no comparison follows for some time."""
        self._exchange.close()

    def _exchange_word(self, does: int, batches: str, taken: int | None = None) -> Word:
        assigned = "" if self._assigned is None else self._assigned.digest
        taken = self._taken if taken is None else taken
        word = [does, taken, batches, assigned, self.watched, current().rank]
        least, greatest = self._exchange.send(word)
        _compare(least, greatest)
        return greatest


def check_course(given: dict[str, Any], saves: bool) -> None:
    """Check that the processes reach the same points of a `fit`.

    Args:
        given: The arguments of `fit`, by name.
        saves: Whether there is a checkpoint among the callbacks.

    Raises:
        ProcessesDisagree: If they do not.
    """
    validates = given.get("validation_data") is not None or bool(given.get("validation_split"))
    often = repr(given.get("validation_freq", 1)) if validates else ""
    least, greatest = once([validates, saves, often, current().rank])
    without, has = least[3], greatest[3]
    for what, one, other in zip(_GIVEN, least, greatest, strict=False):
        if one != other:
            raise ProcessesDisagree(
                f"Process {has} was given {what} for its fit, but process {without} none: they "
                "would wait for\neach other forever. Pass the same arguments in every process."
            )
    if least[2] != greatest[2]:
        raise ProcessesDisagree(
            f"Process {has} was given validation_freq={greatest[2]}, but process {without} "
            f"{least[2]}: they would\n"
            "wait for each other forever. Pass the same value in every process."
        )


_GIVEN = ("validation data", "a lockstep.Checkpoint")


def _compare(least: Word, greatest: Word) -> None:
    """Raise if these two words show that two processes differ."""
    if least[:4] == greatest[:4]:
        return
    first, other = sorted([least[-1], greatest[-1]])
    # A process that begins anew restarts its count. A process that has ended therefore sorts first,
    # whatever its count.
    (_, taken, *_, fewer), (*_, more) = sorted(
        [least, greatest], key=lambda word: (word[0] != _ENDED, word[1], -word[0])
    )
    if least[:3] == greatest[:3]:
        raise ProcessesDisagree(
            f"Process {other} has assigned different values to variables than process {first}, "
            "or at a different time: their copies would differ.\nAssign the same values in "
            "every process (a learning rate, or weights from a shared file),\nand go back to an "
            "earlier file."
        )
    if least[0] == greatest[0] == _COMPARES:
        raise ProcessesDisagree(
            f"In one of the {counted(taken, 'batch')} of this epoch, process {other} had "
            f"different rows than process {first}, in {CALLS.data}:\nthe results differ from "
            "one device. Give every process the same data in the same order\n(seed the order). "
            "After a fit, go back to a file of the previous epoch."
        )
    if least[0] == greatest[0] == _WHOLE:
        raise ProcessesDisagree(
            f"Process {other} has a different batch than process {first} in {CALLS.data}: each "
            "would compute on its own rows.\nGive every process the same data in the same order "
            "(seed the order), and the global batch size:\nlockstep gives each device its rows."
        )
    if least[:2] == greatest[:2] and least[0] == _GOES_ON:
        raise ProcessesDisagree(
            f"Process {other} has different shapes or types than process {first} in batch "
            f"{taken} of its epoch, or in an earlier one,\n"
            f"in {CALLS.data}: they would run different programs.\n"
            "Give every process the same data in the same order (seed the order)."
        )
    if least[0] == greatest[0] == _BEGINS:
        _compare_steps(least, greatest)
        raise ProcessesDisagree(
            f"Process {other} has a different first batch, or a different number of batches or "
            f"rows, than process {first},\nin {CALLS.data}: rows would be skipped or trained on "
            "twice.\nGive every process the same data in the same order (seed the order), and "
            "the global batch size."
        )
    raise ProcessesDisagree(
        f"Process {fewer} ends after {counted(taken, 'batch')}, but process {more} has more, "
        f"and a step needs every process.\nThis is {CALLS.data}. Give every process the same "
        f"number of batches, or limit it with {CALLS.steps_argument}.\nThe weights are those "
        "after the last common step."
    )


def _compare_steps(least: Word, greatest: Word) -> None:
    """Raise if these words have another number of steps, which the user has given."""
    steps = {word[-1]: word[2].split()[0] for word in (least, greatest)}
    (first, one), (other, another) = sorted(steps.items())
    if one != another:
        name = CALLS.steps_argument
        raise ProcessesDisagree(
            f"Process {other} was given {name}={another}, but process {first} {name}={one}, for "
            f"{CALLS.data}.\n"
            "They would wait for each other forever. Pass the same value in every process."
        )


def _first_rows(batch: Any, rows: object) -> str:
    found = _new_hash()
    found.update(repr(rows).encode())
    for array in _arrays(batch):
        _add(found, np.atleast_1d(array)[: 1 << 10], array)
    return found.hexdigest()


def _shapes(batches: list[Any]) -> str:
    return digest([repr([_kind(array) for array in _arrays(batches)]).encode()])


def _arrays(batch: Any) -> list[np.ndarray]:
    return [current().to_host(leaf) for leaf in keras.tree.flatten(batch) if leaf is not None]


def _new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def _add(found: hashlib.blake2b, part: np.ndarray, array: np.ndarray) -> None:
    found.update(repr(_kind(array)).encode())
    if not part.dtype.hasobject:  # no device accepts it
        found.update(part.tobytes())


def _kind(array: np.ndarray) -> tuple[tuple[int, ...], str]:
    return array.shape, str(array.dtype)
