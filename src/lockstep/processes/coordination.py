"""Words that processes exchange over the store of their group instead of the devices.

A sum over devices would wait for the steps in progress on them.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from lockstep.errors import ProcessesDisagree
from lockstep.processes.call_scope import CALLS
from lockstep.processes.group import current

Word = list[Any]
"""Numbers and strings, in the same positions in every process."""

_SECOND = 1000
_TURN = 25
"""Milliseconds to wait at each of two keys where a word may arrive."""
_PRINT_AFTER = 30
"""Seconds that a process waits before it prints the process it waits for."""
_PATIENCE, _DEFAULT_PATIENCE = "LOCKSTEP_PATIENCE", 120.0
"""The seconds that a process waits before it raises, and the variable that sets them."""
_TO_TELL = 10.0
"""Seconds that a process has to say why it has left a step."""
_BLOCK = 64
_done: list[str] = []
"""Folders of words that every process has read when all processes reach a later exchange."""


class WordExchange:
    """Exchange words: every process sends one word and gets the extremes of all.

    Every process makes the same exchanges, in the same order.

    Args:
        kind: Words of another kind are none of this exchange.
    """

    def __init__(self, kind: str = "") -> None:
        self._name = CALLS.new_name() + kind
        self._block = 0
        self._count = 0

    def send(self, word: Word) -> tuple[Word, Word]:
        """Send a word, and return the least and the greatest word of all processes.

        Raises:
            ProcessesDisagree: If another process has left this call, or does not answer.
        """
        CALLS.move()
        # In each round a process passes on the extremes that it knows, to a process twice as far
        # away as in the round before. After log2(processes) rounds all processes know all words.
        least = greatest = word
        for place, mine, theirs in self._rounds():
            _write(f"{place}/{mine}", [least, greatest])
            heard_least, heard_greatest = _read(f"{place}/{theirs}", theirs)
            least, greatest = min(least, heard_least), max(greatest, heard_greatest)
        self._next()
        return least, greatest

    def gather(self, word: Word) -> list[Word]:
        """Send a word, and return those of all processes, in the order of the ranks.

        Raises:
            ProcessesDisagree: If another process has left this call, or does not answer.
        """
        CALLS.move()
        known: dict[int, Word] = {current().rank: word}
        for place, mine, theirs in self._rounds():
            _write(f"{place}/{mine}", [[rank, said] for rank, said in known.items()])
            known |= {rank: said for rank, said in _read(f"{place}/{theirs}", theirs)}  # noqa: C416
        self._next()
        return [known[rank] for rank in range(current().size)]

    def close(self) -> None:
        """Mark the words for deletion: no exchange follows for some time."""
        _done.append(self._folder())
        self._block, self._count = self._block + 1, 0

    def _folder(self) -> str:
        return f"{self._name}/{self._block}"

    def _rounds(self) -> Iterator[tuple[str, int, int]]:
        """Yield for each round its folder, this process, and the process whose word it reads."""
        me, processes = current().rank, current().size
        distance = 1
        while distance < processes:
            yield f"{self._folder()}/{self._count}/{distance}", me, (me - distance) % processes
            distance *= 2

    def _next(self) -> None:
        """Delete old words: all processes are here, and so have read every earlier word."""
        while _done:
            current().delete(_done.pop())
        self._count += 1
        if self._count == _BLOCK:
            self.close()


def once(word: Word, kind: str = "") -> tuple[Word, Word]:
    """Exchange one word; see `WordExchange`."""
    exchange = WordExchange(kind)
    heard = exchange.send(word)
    exchange.close()
    return heard


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """Return a hash of these bytes, to stand for them in a word."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def report_done(name: str) -> None:
    """Report that something is done."""
    _write(name, [])


def wait_for_first_process(name: str, passed: str) -> None:
    """Wait until the first process reports that it is done, or that it has moved on.

    Raises:
        ProcessesDisagree: If the first process has left the call, or does not answer.
    """
    _read(name, 0, passed)


def _write(key: str, words: list[Word]) -> None:
    current().put(key, json.dumps(words))


def lost_connection_error() -> ProcessesDisagree:
    """Return the error of a process whose connection to another one has broken in a step."""
    me, start = current().rank, time.monotonic()
    others = [process for process in range(current().size) if process != me]
    while time.monotonic() - start < _TO_TELL:
        for process in others:
            left = CALLS.left(process)
            if left is not None:
                return left
        time.sleep(_TURN / _SECOND)
    return ProcessesDisagree(
        f"Process {me} has lost contact with another process in a step of its {CALLS.name}. "
        "That process has ended, is suspended,\nor makes different calls. See the output of the "
        "other processes. The weights are those after the last common step."
    )


def _read(key: str, process: int, instead: str | None = None) -> list[Word]:
    """Return the words that another process writes at a key.

    Ctrl-C works during the wait.

    Args:
        key: The key.
        process: The process that writes.
        instead: A second key at which it may write instead.
    """
    places = [key] if instead is None else [key, instead]
    said = _read_within_a_second(places)
    if said is None:
        said = _waited_for(places, process)
    words: list[Word] = json.loads(said)
    return words


def _waited_for(places: list[str], process: int) -> str:
    start, printed, limit = time.monotonic(), False, patience()
    while True:
        waited = time.monotonic() - start
        left = CALLS.left(process) or CALLS.brings_others(process)
        left = left or (_no_answer(process, waited) if waited >= limit else None)
        if left is not None:
            said = next(filter(None, map(current().get, places)), None)  # it may just have arrived
            if said is None:
                raise left
            return said
        if waited >= _PRINT_AFTER and not printed:
            printed = True
            print(
                f"lockstep: process {current().rank} has waited for process {process} in "
                f"{CALLS.name} for {waited:.0f} seconds; every process must make this call",
                file=sys.stderr,
                flush=True,
            )
        said = _read_within_a_second(places)
        if said is not None:
            return said


def patience() -> float:
    """Return the seconds that this process waits for another one.

    Raises:
        ProcessesDisagree: If the variable is no positive number.
    """
    text = os.environ.get(_PATIENCE, "")
    try:
        seconds = float(text or _DEFAULT_PATIENCE)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ProcessesDisagree(
            f"{_PATIENCE}={text!r} is set, but a positive number of seconds was expected.\n"
            f"Unset it to use the default of {_DEFAULT_PATIENCE:g} seconds."
        )
    return seconds


def _no_answer(process: int, seconds: float) -> ProcessesDisagree:
    return ProcessesDisagree(
        f"Process {current().rank} has waited {seconds:.0f} seconds in {CALLS.name} for process "
        f"{process}, which has ended, is suspended, or makes different calls.\nMake the same "
        "calls in the same order, with the same callbacks, in every process. Or wait longer "
        f"with\n{_PATIENCE}=seconds. The weights are those after the last common step."
    )


def _read_within_a_second(places: list[str]) -> str | None:
    turn = _SECOND if len(places) == 1 else _TURN
    for _ in range(_SECOND // (turn * len(places))):
        for place in places:
            said = current().wait(place, turn)
            if said is not None:
                return said
    return None
