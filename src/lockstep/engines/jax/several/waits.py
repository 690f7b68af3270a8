"""Which process waits for which, and whether they wait for one another for ever.

Processes that make other calls, or the same ones in another order, come to different exchanges:
each waits for a word that the other one will not say.
"""

import itertools
import json
import time
from typing import Any

import jax

from lockstep.engines.jax.several.calls import CALLS, client, said_now
from lockstep.errors import ProcessesDisagree

_COUNT = itertools.count()
_ALIKE = 2.0
"""Seconds in which the others of a ring find it as well, each by itself."""


class Wait:
    """A wait of this process for a word of another one; it is said to all while it lasts.

    Args:
        places: Where the word may come to stand.
        process: The one that is to say it.
    """

    def __init__(self, places: list[str], process: int) -> None:
        self._for = process
        self._ring: list[Any] | None = None
        _say([next(_COUNT), places, process, CALLS.name])

    def end(self) -> None:
        """The wait is over."""
        _say([])

    def is_for_ever(self) -> ProcessesDisagree | None:
        """What to raise where the process that is waited for waits, in the end, for this one.

        It is asked again and again: the second time that the same waits are found, all of them
        have lasted together in between, so that none of them will end.
        """
        ring, before = self._others(), self._ring
        self._ring = ring
        if ring is None or ring != before:
            return None
        time.sleep(_ALIKE)
        me, name = jax.process_index(), ring[0][3]
        return ProcessesDisagree(
            f"Process {me} waits in {CALLS.name} for process {self._for}, which waits in {name} at "
            "another place: none would go on.\n"
            "Let every process make the same calls in the same order (evaluate, save, compile), "
            "with the same callbacks.\nThe weights are those after the last step of all."
        )

    def _others(self) -> list[Any] | None:
        """The waits of the others in the ring, or `None` where there is none."""
        waits: list[Any] = []
        process = self._for
        while process != jax.process_index():
            wait = json.loads(said_now(_place(process)) or "[]")
            if not wait or len(waits) == jax.process_count() or any(map(said_now, wait[1])):
                return None
            waits.append(wait)
            process = wait[2]
        return waits


def _say(wait: list[Any]) -> None:
    client().key_value_set(_place(jax.process_index()), json.dumps(wait), allow_overwrite=True)


def _place(process: int) -> str:
    return f"lockstep/waits/{process}"
