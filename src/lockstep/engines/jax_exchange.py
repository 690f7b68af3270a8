"""Words that processes exchange over JAX's coordination service, past the devices.

A sum over devices would wait for the steps that are under way on them.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed

Word = list[int]

_SECOND = 1000
_BLOCK = 64
_numbers = itertools.count()
_done: list[str] = []
"""Folders of words that every process will have read when all have come to another exchange."""


class Exchange:
    """Exchanges in which every process says one word, and hears of all.

    Every process makes the same exchanges, in the same order.
    """

    def __init__(self) -> None:
        self._name = f"lockstep/{next(_numbers)}"
        self._block = 0
        self._count = 0

    def say(self, word: Word) -> tuple[Word, Word]:
        """Say a word; when all processes have, the least and the greatest word are returned."""
        # In each round a process passes on what it has heard of, to one that is twice as far away
        # as in the round before: after log2(processes) rounds, all have heard of all.
        least = greatest = word
        for mine, theirs in self._rounds():
            _write(mine, [least, greatest])
            heard_least, heard_greatest = _read(theirs)
            least, greatest = min(least, heard_least), max(greatest, heard_greatest)
        self._next()
        return least, greatest

    def leave(self, word: Word) -> None:
        """Say a word, and wait for nobody."""
        # Where the service is gone, nobody is left to hear it.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            for mine, _ in self._rounds():
                _write(mine, [word, word])
        self._count += 1

    def close(self) -> None:
        """Nothing more is said for some time: what was said may be forgotten."""
        _done.append(self._folder())
        self._block, self._count = self._block + 1, 0

    def _folder(self) -> str:
        return f"{self._name}/{self._block}"

    def _rounds(self) -> Iterator[tuple[str, str]]:
        """Where this process writes in each round, and where it reads."""
        me, processes = jax.process_index(), jax.process_count()
        distance = 1
        while distance < processes:
            place = f"{self._folder()}/{self._count}/{distance}"
            yield f"{place}/{me}", f"{place}/{(me - distance) % processes}"
            distance *= 2

    def _next(self) -> None:
        """All have come here, and so have read whatever was said before."""
        while _done:
            folder = _done.pop()
            if jax.process_index() == 0:
                _client().key_value_delete(folder)
        self._count += 1
        if self._count == _BLOCK:
            self.close()


def _write(key: str, words: list[Word]) -> None:
    _client().key_value_set(key, json.dumps(words), allow_overwrite=True)


def _read(key: str) -> list[Word]:
    """What another process writes there, however long it takes; Ctrl-C is heard meanwhile."""
    while True:
        try:
            said = _client().blocking_key_value_get(key, _SECOND)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        else:
            words: list[Word] = json.loads(said)
            return words


def _client() -> Any:
    # jax/_src/distributed.py, State.client: what jax.distributed.initialize has connected.
    return distributed.global_state.client
