"""Which call each process is in, or has left: what those that wait for it go by.

Every process calls `distribute`, `fit`, `evaluate` and so on, in the same order. One that
leaves a call by an error says so where all can read it, past the devices, and those that
wait for a word of it raise as well.
"""

import itertools
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
from jax._src import distributed

from lockstep.errors import ProcessesDisagree

_LEFT, _ENDED = "left", "ended"


class Calls:
    """The calls that this process has made.

    Attributes:
        name: Of the call that this process is in, or was in last.
        steps: How many steps have been asked about by `lockstep.Checkpoint`, in all calls.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._number = 0
        self.name = ""
        self._within = self._ended = self._alone = False
        self._names = itertools.count()
        self._moves = 0
        self._files: Counter[str] = Counter()

    @contextmanager
    def call(self, name: str) -> Iterator[bool]:
        """A call that every process makes; false is yielded where it is within another one."""
        if self._within:
            yield False
            return
        self._number, self.name, self._within = self._number + 1, name, True
        self._ended, self._names, self._moves = False, itertools.count(), 0
        self._files.clear()
        try:
            yield True
        except BaseException as error:
            by = error.left_by if isinstance(error, ProcessesDisagree) else None
            self._say(_LEFT, jax.process_index() if by is None else by)
            raise
        finally:
            self._within = False

    def new_name(self) -> str:
        """A name that is made in the same place of the same call in every process, and in no other.

        After an error in one process the next call begins with the same names in all.
        """
        return f"lockstep/{self._number}/{self.name}/{next(self._names)}"

    def new_file(self, path: object) -> str | None:
        """A name for a file that is written now; `None` where no other process waits for it.

        It goes by where in the call that is, and by the path: the first process may write more
        files than the others come to.
        """
        if self._alone or not self._within:
            return None
        name = f"{self._place_of_files()}/{zlib.crc32(str(path).encode())}"
        self._files[name] += 1
        return f"{name}/{self._files[name]}"

    def passed(self) -> str:
        """A name for that the first process has gone on from where this one is."""
        return f"{self._place_of_files()}/passed"

    def move(self) -> None:
        """Say that this process goes on, where others may wait for a file of it."""
        if self._files and jax.process_index() == 0:
            client().key_value_set(self.passed(), "[]", allow_overwrite=True)
        self._moves += 1
        self._files.clear()

    def _place_of_files(self) -> str:
        return f"lockstep/{self._number}/file/{self._moves}"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While it lasts, this process writes what no other one comes to."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def end(self) -> None:
        """Say that this process will say nothing more within this call."""
        self.move()
        self._ended = True
        self._say(_ENDED, jax.process_index())

    def left(self, process: int) -> ProcessesDisagree | None:
        """What to raise where another process will not come to where this one waits for it."""
        said = said_now(_place(process))
        if said is None:
            return None  # it has left no call at all
        number, how, by = json.loads(said)
        if number < self._number or (how == _ENDED and self._ended):
            return None
        me, name = jax.process_index(), self.name
        if how == _ENDED:
            return ProcessesDisagree(
                f"Process {by} has come to the end of its {name}, and process {me} goes on: a step "
                "needs every process.\n"
                "Let every process stop after the same step or epoch (by the logs, say, and not "
                "by a clock).\nThe weights are those after the last step of all."
            )
        found = ProcessesDisagree(
            f"Process {by} left its {name} by an error or an interrupt, and process {me} goes on: "
            "a step needs every process.\n"
            f"See what process {by} says; the weights here are those after the last step of all."
        )
        found.left_by = by  # which those are told that wait for this one
        return found

    def _say(self, how: str, by: int) -> None:
        # Where the service is gone, nobody is left to hear it.
        with suppress(jax.errors.JaxRuntimeError):
            said = json.dumps([self._number, how, by])
            client().key_value_set(_place(jax.process_index()), said, allow_overwrite=True)


CALLS = Calls()
"""Those of this process, as JAX's own connection to the others is one for each process."""


def client() -> Any:
    """The connection to JAX's coordination service."""
    # jax/_src/distributed.py, State.client: what jax.distributed.initialize has connected.
    return distributed.global_state.client


def said_now(key: str) -> str | None:
    """What stands there by now, if anything."""
    try:
        said: str = client().key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None
    return said


def _place(process: int) -> str:
    return f"lockstep/calls/{process}"
