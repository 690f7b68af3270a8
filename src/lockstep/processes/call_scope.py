"""The call that each process is in, or has left, as seen by the processes that wait for it.

Every process calls `distribute`, `fit`, `evaluate` and so on, in the same order. A process that
leaves a call by an error reports it over the store of the group, not over the devices. The
processes that wait for its word then raise as well.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lockstep.errors import ProcessesDisagree
from lockstep.processes.group import current

_LEFT, _ENDED = "left", "ended"


class Calls:
    """Track the calls that this process makes.

    Attributes:
        name: The name of the current or last call.
        steps: The number of steps for which `lockstep.Checkpoint` has asked, in all calls.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._number = 0
        self.name = self._inner = ""
        self._within = self._ended = self._left = self._has_own_rows = False
        self._names = itertools.count()
        self._moves = 0
        self._files: Counter[str] = Counter()

    @contextmanager
    def call(self, name: str) -> Iterator[bool]:
        """Enter a call that every process makes; yield false if it is within another call."""
        if self._within:
            outer, self._inner = self._inner, name
            try:
                yield False
            finally:
                self._inner = outer
            return
        self._number, self.name, self._within = self._number + 1, name, True
        self._ended = self._left = self._has_own_rows = False
        self._names, self._moves = itertools.count(), 0
        self._files.clear()
        try:
            yield True
        except BaseException as error:
            by = error.left_by if isinstance(error, ProcessesDisagree) else None
            self._record_end(_LEFT, current().rank if by is None else by)
            self._left, self._names = True, itertools.count()
            raise
        finally:
            self._within = False

    @property
    def data(self) -> str:
        """The data of this point of a call, in words, for an error about them."""
        if self.name != "fit":
            return f"the data of its {self.name}"
        return f"the {'validation' if self._inner == 'evaluate' else 'training'} data of its fit"

    @property
    def steps_argument(self) -> str:
        """The argument that limits the steps of this point of a call."""
        if self.name != "fit":
            return "steps"
        return "validation_steps" if self._inner == "evaluate" else "steps_per_epoch"

    def new_name(self) -> str:
        """Return a name that is unique, and equal in all processes at the same point of a call.

        After an error, the names are the same again in all processes that have left the call, and
        in the next call.
        """
        part = "after" if self._left else "in"
        return f"lockstep/{self._number}/{self.name}/{part}/{next(self._names)}"

    def new_file(self, path: object) -> str | None:
        """Return a name for a file to be written; `None` if no other process waits for it.

        The name depends on the position in the call and on the path. The first process may write
        more files than the others.
        """
        if not self._within:
            return None
        name = f"{self._place_of_files()}/{hashlib.sha256(str(path).encode()).hexdigest()}"
        self._files[name] += 1
        return f"{name}/{self._files[name]}"

    def passed(self) -> str:
        """Return the name under which the first process reports that it has moved on from here."""
        return f"{self._place_of_files()}/passed"

    def move(self) -> None:
        """Report that this process moves on, if others may wait for a file of it."""
        if self._files and current().rank == 0:
            current().put(self.passed(), "[]")
        self._moves += 1
        self._files.clear()

    def _place_of_files(self) -> str:
        return f"lockstep/{self._number}/file/{self._moves}"

    def end(self) -> None:
        """Report that this process sends no more words within this call."""
        self.move()
        self._ended = True
        self._record_end(_ENDED, current().rank)

    def note_own_rows(self) -> None:
        """Report that this process was given rows of its own for this call, which has one batch."""
        self._has_own_rows = True
        current().put(_place_of_rows(current().rank), json.dumps([self._number, self.name]))

    def brings_others(self, process: int) -> ProcessesDisagree | None:
        """Return the error to raise if `process` has rows of its own here, and this one plain data.

        Plain data cost no exchange for it: a process that waits looks.
        """
        if self._has_own_rows or not self._within:
            return None
        said = current().get(_place_of_rows(process))
        if said is None or json.loads(said) != [self._number, self.name]:
            return None
        return other_data_error((process, OWN_DATA), (current().rank, PLAIN_DATA))

    def left(self, process: int) -> ProcessesDisagree | None:
        """Return the error to raise if `process` will not reach the point of this wait."""
        said = current().get(_place(process))
        if said is None:
            return None  # it has left no call
        number, how, by = json.loads(said)
        if number < self._number or (how == _ENDED and self._ended):
            return None
        if self._left and number == self._number:  # both have left it, and may do more
            return None
        me, name = current().rank, self.name
        if how == _ENDED:
            return ProcessesDisagree(
                f"Process {by} has finished its {name}, but process {me} continues, and a step "
                "needs every process.\nStop every process after the same step or epoch (decide "
                "from the logs, not from a clock).\nThe weights are those after the last common "
                "step."
            )
        found = ProcessesDisagree(
            f"Process {by} left its {name} with an error or an interrupt, but process {me} "
            "continues, and a step needs every process.\n"
            f"See the output of process {by}. The weights are those after the last common step."
        )
        found.left_by = by  # passed on to processes that wait for this one
        return found

    def _record_end(self, how: str, by: int) -> None:
        # If the service is gone, no process can read it.
        with suppress(RuntimeError):
            said = json.dumps([self._number, how, by])
            current().put(_place(current().rank), said)


CALLS = Calls()
"""The calls of this process, which is in one group."""


def other_data_error(one: tuple[int, str], other: tuple[int, str]) -> ProcessesDisagree:
    """Return the error of two processes that were given data in two ways.

    Args:
        one: A process, and its way.
        other: Another process, and its way.
    """
    return ProcessesDisagree(
        f"Process {one[0]} was given {one[1]}, but process {other[0]} {other[1]}:\n"
        "they would not form one batch. Pass the data in the same way in every process."
    )


OWN_DATA, PLAIN_DATA = "lockstep.process_local", "plain data"
"""Two ways to give a process its data."""


def _place(process: int) -> str:
    return f"lockstep/calls/{process}"


def _place_of_rows(process: int) -> str:
    return f"lockstep/rows/{process}"
