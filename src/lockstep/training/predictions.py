"""Where the rows of a `predict` go: into memory, to a function, or into files."""

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from lockstep.checkpoint.fingerprint import config_of, first_difference
from lockstep.checkpoint.prediction_folder import SUFFIX, PredictionFolder, positions_in
from lockstep.core.engine import Session
from lockstep.core.fit_lines import callbacks_in
from lockstep.core.state import named_variables, to_host
from lockstep.errors import PredictionFileError, UnsupportedModel, counted
from lockstep.keras_compat import layers_in, seed_generators
from lockstep.processes.coordination import Exchange, digest, once
from lockstep.processes.group import current
from lockstep.processes.own_rows import brings_own_rows
from lockstep.processes.process_group import is_first, several
from lockstep.processes.row_exchange import Counts

SECONDS, _SHARE = 10.0, 30
"""Seconds between two saves of the position: a kill costs the work since the last one. If a save is
slow, the next one waits at least `_SHARE` times as long as it took."""


class RowsInMemory:
    """Joins the rows of a `predict`, as Keras does."""

    def __init__(self) -> None:
        self._parts: list[Any] = []

    @contextlib.contextmanager
    def opened(self, session: Session, batches: Any) -> Iterator[None]:
        """Take the rows of a prediction inside the context.

        Args:
            session: The model on its devices.
            batches: The iterator over the batches.
        """
        yield

    def take(self, outputs: Any) -> None:
        """Take the rows of an execution, given its outputs."""
        self._parts.append(outputs)

    def has_rows(self) -> bool:
        """Return whether there was a batch."""
        return bool(self._parts)

    def joined(self) -> Any:
        """Return what `predict` returns."""
        return keras.tree.map_structure(_joined, *self._parts)


class RowsOfProcess(RowsInMemory):
    """Joins the rows of this process, where each brings its own."""

    @contextlib.contextmanager
    def opened(self, session: Session, batches: Any) -> Iterator[None]:
        """Take the rows of a prediction inside the context."""
        self._drawn = batches.data_adapter.counted_rows()
        yield

    def take(self, outputs: Any) -> None:
        """Take the rows of an execution, and keep those of this process."""
        super().take(_own_rows(outputs, _drawn_for(outputs, self._drawn)))


def _drawn_for(outputs: Any, drawn: deque[Counts]) -> list[Counts]:
    """Return the rows of each process in the batches of an execution.

    Args:
        outputs: Its predictions.
        drawn: The rows of each process in these batches, and in later ones.
    """
    rows = len(keras.tree.flatten(outputs)[0])
    taken: list[Counts] = []
    while sum(each.total for each in taken) < rows and drawn:
        taken.append(drawn.popleft())
    return taken


def _own_rows(outputs: Any, batches: list[Counts]) -> Any:
    """Return the rows of this process.

    Args:
        outputs: The predictions of an execution.
        batches: The rows of each process in its batches.

    Raises:
        UnsupportedModel: If the model has not given one row for each row of its input.
    """
    rows = len(keras.tree.flatten(outputs)[0])
    mine, start = [], 0
    for counts in batches:
        own = counts.mine
        mine.append(slice(start + own.start, start + own.stop))
        start += counts.total
    if start != rows:
        raise UnsupportedModel(
            f"{rows} rows were predicted for {start} input rows, so they cannot be assigned to "
            "processes.\nPass all data in every process, without process_local."
        )

    def cut(leaf: Any) -> np.ndarray:
        whole = keras.ops.convert_to_numpy(leaf)
        return np.concatenate([whole[own] for own in mine])

    return keras.tree.map_structure(cut, outputs)


class RowsToFunction(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Gives the rows of a `predict` to a function, in order.

    It is found among the callbacks, and the loop calls it. The rows of one execution are fetched
    while the next one runs.

    Args:
        function: Called with NumPy arrays in the structure of the model's output, in the first
            process; in each one with its rows, where each brings its own.
    """

    def __init__(self, function: Callable[[Any], object]) -> None:
        super().__init__()
        self._function = function
        self._last: Any = None
        self._has_rows = False
        self._drawn: deque[Counts] | None = None
        self._skipped = 0  # batches at the beginning that give no rows

    @property
    def may_act(self) -> bool:
        """Whether code of the user runs between two steps, or one process may fail alone."""
        return True

    @contextlib.contextmanager
    def opened(self, session: Session, batches: Any) -> Iterator[None]:
        """Take the rows of a prediction inside the context."""
        self._count_rows(batches)
        yield
        self.give()

    def _count_rows(self, batches: Any) -> None:
        """Tell the rows of this process from the others from now on, if it has its own."""
        if brings_own_rows(batches.data_adapter):
            self._drawn = batches.data_adapter.counted_rows()

    def take(self, outputs: Any) -> None:
        """Take the rows of an execution, and give those of the one before."""
        position = self._position()
        self.give()
        self._last, self._has_rows = (outputs, position), True  # at once, for an interrupt

    def give(self) -> None:
        """Give the rows of the last execution, unless they were given."""
        last, self._last = self._last, None
        if last is not None:
            rows = keras.tree.map_structure(_copied, last[0])  # every process takes part
            is_marked = False
            if self._drawn is not None:
                for _ in range(self._skipped):
                    is_marked |= self._drawn.popleft().is_marked
                self._skipped = 0
                counts = _drawn_for(rows, self._drawn)
                is_marked |= any(each.is_marked for each in counts)
                rows = _own_rows(rows, counts)
            if is_first() or self._drawn is not None:
                self._write(rows, last[1], is_marked)

    def _position(self) -> list[int]:
        return []

    def _write(self, rows: Any, position: list[int], is_marked: bool) -> None:
        self._function(rows)

    def has_rows(self) -> bool:
        """Return whether there was a batch."""
        return self._has_rows

    def joined(self) -> None:
        """Return what `predict` returns."""


class RowsIntoFiles(RowsToFunction):
    """Writes the rows of a `predict` into files, and goes on where a call was ended by a kill.

    Where each process has its own rows, each has its files and notes its position. The first one
    marks a batch, after which all note theirs. A kill may come between these notes: all go on at
    the newest position that every process has.

    Args:
        folder: The files of this process.
    """

    def __init__(self, folder: PredictionFolder) -> None:
        super().__init__(print)  # which is not called
        self._folder = folder
        self._facts: dict[str, Any] = {}
        self._state: dict[str, str] = {}
        self._next_note = 0.0

    @property
    def may_act(self) -> bool:
        """Whether one process may fail alone."""
        return several()

    @contextlib.contextmanager
    def opened(self, session: Session, batches: Any) -> Iterator[None]:
        """Begin where an earlier call was; the files are complete at the end.

        Raises:
            PredictionFileError: If that call had another model, or the files do not fit.
        """
        self._session, self._batches = session, batches
        self._count_rows(batches)
        self._has_own = self._drawn is not None
        if self._has_own:
            batches.data_adapter.marks = self._marks
        named = _weights(session.model)
        digests, seeds = _digests(named), _seeds(session.model)
        # Keras counts layers in the names.
        parts = [text for name, text in digests.items() if name not in seeds]
        weights = digest([text.encode() for text in [*parts, *_vocabularies(session.model)]])
        self._facts = {"model": config_of(session.model), "weights": weights}
        self._state = {name: digests[name] for name in _state_among(named)}
        writes = is_first() or self._has_own
        with self._folder.opened() if writes else contextlib.nullcontext() as left:
            self._begin_at(left)
            try:
                yield
                self.give()
            except BaseException:
                with contextlib.suppress(Exception):  # a full disk, or the same error again
                    if not several():
                        self.give()
                with contextlib.suppress(Exception):
                    if writes:
                        self._note()
                raise
            if writes and self.has_rows():
                self._note()  # a kill may come before the files are in place
                if self._has_own:
                    once([0])
                self._folder.finish()
        if several():  # a process that goes on may read the files
            once([0])

    def _position(self) -> list[int]:
        return [*self._batches.position()]

    def _write(self, rows: Any, position: list[int], is_marked: bool) -> None:
        self._folder.write(rows, position)
        if is_marked if self._has_own else time.monotonic() > self._next_note:
            self._note()

    def _marks(self) -> bool:
        """Return whether all processes note their position after the next batch."""
        if time.monotonic() <= self._next_note:
            return False
        self._next_note = math.inf  # until it is noted
        return True

    def _begin_at(self, left: dict[str, Any] | None) -> None:
        """Go on from the position of an unfinished call."""
        if left is not None:
            self._check_facts(left)
        found = 0 if left is not None else None
        if self._has_own:
            found = self._newest_of_all(left)
        if left is not None and found is not None:
            self._folder.go_on(left, found)
            left = positions_in(left)[found]
        elif left is not None:
            self._folder.begin_anew()
            left = None
        if several() and not self._has_own:
            left = json.loads(once([json.dumps(left) if is_first() else ""])[1][0])
        if left is not None:
            self._batches.begin_at(*left["position"])
            self._has_rows, self._skipped = True, left["position"][0]
            rows = max(file["rows"] for file in left["files"])
            if is_first() and (self.params or {}).get("verbose"):
                print(f"lockstep: {self._folder.path} continues after {counted(rows, 'row')}")

    def _newest_of_all(self, left: dict[str, Any] | None) -> int | None:
        """Return the number of the newest position of this process that all processes have."""
        mine = [each["position"][0] for each in positions_in(left)] if left is not None else []
        exchange = Exchange("notes")
        every = exchange.gather(mine)
        exchange.close()
        common = set(mine).intersection(*every)
        return mine.index(max(common)) if common else None

    def _check_facts(self, left: dict[str, Any]) -> None:
        here, written = self._facts, left
        what = None
        if written["model"] is not None and here["model"] is not None:
            what = first_difference(written["model"], here["model"])
        if what is None and written["weights"] != here["weights"]:
            what = "a digest of the weights", written["weights"], here["weights"]
        if what is not None:
            name, there, mine = (part[:60] for part in what)
            raise PredictionFileError(
                f"{self._folder.path} is unfinished, and was written with a different model: "
                f"{name} was {there},\nbut is now {mine}. Use the same model as before, or a "
                f"different path. Or remove the folder\n{self._folder.path.name}{SUFFIX} to "
                "start again."
            )

    def _note(self) -> None:
        """Note the position of the rows that are written.

        State that goes from batch to batch is not saved. After it has changed, no position is
        noted: the next call goes on from the last one before, or begins anew.
        """
        start = time.monotonic()
        self._session.sync()
        if self._state == _digests(_state_among(_weights(self._session.model))):
            self._folder.note(self._facts)
        took = time.monotonic() - start
        self._next_note = start + max(SECONDS, _SHARE * took)


Rows = RowsInMemory | RowsToFunction


def taker_among(callbacks: Any) -> RowsToFunction | None:
    """Return what takes the rows of a `predict`, among its callbacks; `None` for the memory."""
    found = (each for each in callbacks_in(callbacks) if isinstance(each, RowsToFunction))
    return next(found, None)


def _weights(model: Any) -> dict[str, Any]:
    """Return the variables that a prediction may read, by name."""
    kinds = ("trainable/", "non_trainable/")
    return {name: v for name, v in named_variables(model).items() if name.startswith(kinds)}


def _state_among(named: dict[str, Any]) -> dict[str, Any]:
    """Return the variables that a prediction may change. This process can read each alone."""
    return {
        name: variable
        for name, variable in named.items()
        if not name.startswith("trainable/") and not (several() and current().has_part(variable))
    }


def _digests(named: dict[str, Any]) -> dict[str, str]:
    """Return a digest of the value of each variable."""
    read = current().to_host if several() else to_host
    found = {}
    for name, variable in named.items():  # one by one: a value that is in parts is whole here
        array = np.ascontiguousarray(read(variable.value)).reshape(-1)
        found[name] = digest([array.view("uint8").data])
    return found


def _seeds(model: Any) -> set[str]:
    """Return the names of the random seeds, which a new process may draw anew."""
    states = {id(each.state) for layer in layers_in(model) for each in seed_generators(layer)}
    return {name for name, each in named_variables(model).items() if id(each) in states}


def _vocabularies(model: Any) -> list[str]:
    """Return the vocabularies of lookup layers, which adapt to data and are no variables."""
    layers = [layer for layer in layers_in(model) if hasattr(layer, "get_vocabulary")]
    return [repr(layer.get_vocabulary()) for layer in layers]


def _copied(part: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(part))


def _joined(*parts: Any) -> np.ndarray:
    """Return all rows of the predictions of several steps."""
    # One by one: np.concatenate is slower at converting arrays of a framework.
    return np.concatenate([keras.ops.convert_to_numpy(part) for part in parts])
