"""Words that processes exchange over JAX's coordination service, past the devices.

A sum over devices would wait for the steps that are under way on them.
"""

import itertools
import json
import sys
from collections.abc import Iterator

import jax

from lockstep.engines.jax.several.calls import CALLS, client, said_now
from lockstep.engines.jax.several.waits import Wait

Word = list[int]

_SECOND = 1000
_TURN = 25
"""Milliseconds for each of two places where a word may come."""
_SAID_AFTER = 30
"""Seconds that a process waits before it says for whom."""
_BLOCK = 64
_done: list[str] = []
"""Folders of words that every process will have read when all have come to another exchange."""


class Exchange:
    """Exchanges in which every process says one word, and hears of all.

    Every process makes the same exchanges, in the same order.
    """

    def __init__(self) -> None:
        self._name = CALLS.new_name()
        self._block = 0
        self._count = 0

    def say(self, word: Word) -> tuple[Word, Word]:
        """Say a word; when all processes have, the least and the greatest word are returned.

        Raises:
            ProcessesDisagree: If one of them has left the call in which this one waits, or waits
                for ever itself.
        """
        CALLS.move()
        # In each round a process passes on what it has heard of, to one that is twice as far away
        # as in the round before: after log2(processes) rounds, all have heard of all.
        least = greatest = word
        for place, mine, theirs in self._rounds():
            _write(f"{place}/{mine}", [least, greatest])
            heard_least, heard_greatest = _read(f"{place}/{theirs}", theirs)
            least, greatest = min(least, heard_least), max(greatest, heard_greatest)
        self._next()
        return least, greatest

    def close(self) -> None:
        """Nothing more is said for some time: what was said may be forgotten."""
        _done.append(self._folder())
        self._block, self._count = self._block + 1, 0

    def _folder(self) -> str:
        return f"{self._name}/{self._block}"

    def _rounds(self) -> Iterator[tuple[str, int, int]]:
        """Where each round is written, this process, and the one whose word it reads."""
        me, processes = jax.process_index(), jax.process_count()
        distance = 1
        while distance < processes:
            yield f"{self._folder()}/{self._count}/{distance}", me, (me - distance) % processes
            distance *= 2

    def _next(self) -> None:
        """All have come here, and so have read whatever was said before."""
        while _done:
            folder = _done.pop()
            if jax.process_index() == 0:
                client().key_value_delete(folder)
        self._count += 1
        if self._count == _BLOCK:
            self.close()


def once(word: Word) -> tuple[Word, Word]:
    """An exchange of one word."""
    exchange = Exchange()
    heard = exchange.say(word)
    exchange.close()
    return heard


def tell(name: str) -> None:
    """Say that something has been done."""
    _write(name, [])


def wait_for_first(name: str, passed: str) -> None:
    """Return when the first process has told that it has been done, or that it has gone on.

    Raises:
        ProcessesDisagree: If it has left the call before, or waits for this one.
    """
    _read(name, 0, passed)


def _write(key: str, words: list[Word]) -> None:
    client().key_value_set(key, json.dumps(words), allow_overwrite=True)


def _read(key: str, process: int, instead: str | None = None) -> list[Word]:
    """What another process writes there, however long it takes; Ctrl-C is heard meanwhile.

    Args:
        key: The place.
        process: The one that writes.
        instead: Another place, where it may write instead.
    """
    places = [key] if instead is None else [key, instead]
    said = _said_within_a_second(places)
    if said is None:
        wait = Wait(places, process)
        try:
            said = _waited_for(places, process, wait)
        finally:
            wait.end()
    words: list[Word] = json.loads(said)
    return words


def _waited_for(places: list[str], process: int, wait: Wait) -> str:
    for waited in itertools.count(1):
        left = wait.is_for_ever() or CALLS.left(process)
        if left is not None:
            said = next(filter(None, map(said_now, places)), None)  # as the last thing before
            if said is None:
                raise left
            return said
        if waited == _SAID_AFTER:
            print(
                f"lockstep: process {jax.process_index()} has waited for process {process} in "
                f"{CALLS.name} for {waited} seconds; every process has to call it",
                file=sys.stderr,
                flush=True,
            )
        said = _said_within_a_second(places)
        if said is not None:
            return said
    raise AssertionError


def _said_within_a_second(places: list[str]) -> str | None:
    turn = _SECOND if len(places) == 1 else _TURN
    for _ in range(_SECOND // (turn * len(places))):
        for place in places:
            said = _said(place, turn)
            if said is not None:
                return said
    return None


def _said(key: str, milliseconds: int) -> str | None:
    try:
        said: str = client().blocking_key_value_get(key, milliseconds)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None
    return said
