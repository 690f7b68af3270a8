"""Joins the rows that each process has for a step into one global batch."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from lockstep.errors import ProcessesDisagree, UnusableData, counted
from lockstep.processes.coordination import WordExchange, digest
from lockstep.processes.group import current


@dataclass(frozen=True)
class Form:
    """All that a batch is but for its rows.

    Attributes:
        leaves: The type of each array, and its shape without the number of rows.
        structure: The structure of the batch, with the number of an array in its place.
    """

    leaves: tuple[tuple[str, tuple[int, ...]], ...]
    structure: Any

    @classmethod
    def of(cls, batch: Any) -> tuple["Form", list[np.ndarray]]:
        """Return the form of a batch, and its arrays."""
        arrays: list[np.ndarray] = []
        structure = _described(batch, arrays)
        kinds = tuple((array.dtype.name, tuple(array.shape[1:])) for array in arrays)
        return cls(kinds, structure), arrays

    def as_text(self) -> str:
        """Return the form as a text, which `from_text` reads."""
        return json.dumps([self.leaves, self.structure])

    @classmethod
    def from_text(cls, text: str) -> "Form":
        """Return the form of `as_text`."""
        leaves, structure = json.loads(text)
        return cls(tuple((name, tuple(shape)) for name, shape in leaves), structure)

    def bytes_of(self, rows: int) -> int:
        """Return the bytes of so many rows of all arrays."""
        each = (np.dtype(name).itemsize * math.prod(shape) for name, shape in self.leaves)
        return rows * sum(each)

    def rows_in(self, packed: np.ndarray, rows: int) -> list[np.ndarray]:
        """Return the arrays of a process, given their bytes."""
        found, start = [], 0
        for name, shape in self.leaves:
            size = rows * np.dtype(name).itemsize * math.prod(shape)
            # A copy: the place of an array in the bytes may not be aligned for its type.
            part = packed[start : start + size].copy()
            found.append(part.view(np.dtype(name)).reshape(rows, *shape))
            start += size
        return found

    def batch(self, arrays: list[Any]) -> Any:
        """Return a batch of these arrays."""
        return _filled(self.structure, arrays)

    def words(self) -> str:
        """Return the types and shapes, for a message."""
        each = [f"{name}{list(shape)}" for name, shape in self.leaves[:4]]
        return ", ".join(each) + (", ..." if len(self.leaves) > 4 else "")


def _described(part: Any, arrays: list[np.ndarray]) -> Any:
    """Return the structure of a batch as JSON has it, and append its arrays."""
    if part is None:
        return None
    if isinstance(part, dict):
        return {"dict": [[key, _described(each, arrays)] for key, each in part.items()]}
    if type(part) in (tuple, list):
        return {type(part).__name__: [_described(each, arrays) for each in part]}
    part = current().rows_here(part)
    if isinstance(part, tuple | list) or not hasattr(part, "__array__"):
        raise UnusableData(
            f"A batch contains a {type(part).__name__}, but only arrays can be joined across "
            "processes.\nYield dense arrays in tuples, lists and dicts."
        )
    array = current().to_host(part)
    if isinstance(array, np.ma.MaskedArray) or array.dtype.hasobject or array.dtype.kind in "USMm":
        raise UnusableData(
            f"A batch has an array of type {array.dtype}, but only numbers can be joined across "
            "processes.\nYield numbers, for example from a StringLookup or TextVectorization in "
            "a map of the data."
        )
    if array.ndim == 0 or (arrays and len(array) != len(arrays[0])):
        sizes = f"of shape {array.shape}" + (
            f" next to arrays of {len(arrays[0])} rows" if arrays else ""
        )
        raise UnusableData(
            f"A batch has an array {sizes}, so it cannot be joined by rows across processes.\n"
            "Use the same number of rows in every array of a batch."
        )
    if not array.dtype.isnative:  # its bytes travel, and have no order of their own
        array = array.astype(array.dtype.newbyteorder("="))
    arrays.append(array)
    return len(arrays) - 1


def _filled(structure: Any, arrays: list[Any]) -> Any:
    if structure is None:
        return None
    if isinstance(structure, int):
        return arrays[structure]
    ((kind, parts),) = structure.items()
    if kind == "dict":
        return {key: _filled(each, arrays) for key, each in parts}
    each = [_filled(part, arrays) for part in parts]
    return each if kind == "list" else tuple(each)


@dataclass(frozen=True)
class Counts:
    """The rows of each process in a global batch, in the order of the ranks.

    Attributes:
        each: The rows of each process.
        is_marked: Whether the first process has marked this batch, for all.
    """

    each: tuple[int, ...]
    is_marked: bool = False

    @property
    def total(self) -> int:
        """The rows of the global batch."""
        return sum(self.each)

    @property
    def mine(self) -> slice:
        """The rows of this process among them."""
        rank = current().rank
        start = sum(self.each[:rank])
        return slice(start, start + self.each[rank])


class RowsHere:
    """An array of the global batch, of which this process has the rows that its devices need.

    Args:
        rows: Those rows.
        counts: The rows of each process.
    """

    def __init__(self, rows: np.ndarray, counts: Counts) -> None:
        self._rows, self._start, self._counts = rows, counts.mine.start, counts
        self.shape = (counts.total, *rows.shape[1:])
        self.dtype, self.ndim = rows.dtype, rows.ndim

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return a range of rows of the global batch, which are here."""
        start, stop, _ = index[0].indices(self.shape[0])
        return self._rows[start - self._start : stop - self._start]

    def mine(self) -> np.ndarray:
        """Return the rows of this process."""
        return self._rows

    def whole(self) -> np.ndarray:
        """Return the rows of all processes; every process calls this."""
        of_row = self.dtype.itemsize * math.prod(self.shape[1:])
        sizes = [of_row * each for each in self._counts.each]
        parts = current().gather(_bytes_of(self._rows), sizes)
        return np.concatenate(parts).view(self.dtype).reshape(self.shape)


def rows_of_process(batch: Any, counts: Counts) -> Any:
    """Return the rows of this process in a global batch."""

    def cut(leaf: Any) -> Any:
        return leaf.mine() if isinstance(leaf, RowsHere) else leaf[counts.mine]

    return keras.tree.map_structure(cut, batch)


class RowExchange:
    """Joins batches of all processes; every process makes the same calls in the same order.

    Args:
        warn: Called with a warning; `None` for none.

    Attributes:
        stays: Returns for the rows of each process whether the devices of each need its own rows,
            so that none has to travel. `None`: all rows are gathered in every process.
    """

    stays: Callable[[tuple[int, ...]], bool] | None = None

    def __init__(self, warn: Callable[[str], object] | None = None) -> None:
        self._exchange = WordExchange("own rows")
        self._forms: dict[str, Form] = {}
        self._sent: set[str] = set()
        self._is_first = warn is not None
        self._warn = warn

    def agreed(self, number: int | None) -> int | None:
        """Return the greatest number of all processes; `None` if it is not known in one."""
        said = self.numbers(-1 if number is None else number)
        return None if min(said) < 0 else max(said)

    def numbers(self, mine: int) -> list[int]:
        """Return the number of every process, in the order of the ranks."""
        return [int(word[0]) for word in self._exchange.gather([mine])]

    def joined(
        self, batch: Any, order: str = "", *, marked: bool = False
    ) -> tuple[Any, Counts] | None:
        """Return the rows of all processes as one batch, `None` if no process has a batch.

        Args:
            batch: The batch of this process, `None` for none.
            order: A digest of what is the same in all processes.
            marked: Whether to mark the batch. That of the first process counts.

        Raises:
            ProcessesDisagree: If processes have batches of other structures, types or shapes, or
                another order.
            UnusableData: If rows of this batch cannot be joined.
        """
        form, arrays = (None, []) if batch is None else Form.of(batch)
        name, text = "", ""
        if form is not None:
            text = form.as_text()
            name = digest([text.encode()])
            self._forms[name] = form
        rows = len(arrays[0]) if arrays else 0
        check = _digests(arrays, rows) if self._is_first else []
        said = "" if name in self._sent else text
        words = self._gathered([rows, name, said, marked, check, order])
        self._sent.add(name)
        for _, each, theirs, *_ in words:
            if theirs:
                self._forms.setdefault(each, Form.from_text(theirs))
        for rank, (*_, theirs) in enumerate(words):
            if theirs != words[0][-1]:
                raise ProcessesDisagree(
                    f"Process {rank} draws different rows than process 0, or in a different "
                    "order: rows would be skipped or trained on twice.\n"
                    "Use the same data set in every process, and seed the order."
                )
        if all(not each for _, each, *_ in words):
            return None
        if self._is_first:
            self._is_first = False
            self._compare_first(words)
        common = self._common([each for _, each, *_ in words])
        counts = Counts(tuple(int(each) for each, *_ in words), bool(words[0][3]))
        if self.stays is not None and self.stays(counts.each):
            # A device may read the copy in place.
            return common.batch([RowsHere(array.copy(), counts) for array in arrays]), counts
        packed = _packed(arrays, common.bytes_of(rows))
        parts = current().gather(packed, [common.bytes_of(each) for each in counts.each])
        of_each = [
            common.rows_in(part, each)
            for part, each in zip(parts, counts.each, strict=True)
            if each or counts.total == 0
        ]
        whole = [np.concatenate(rows) for rows in zip(*of_each, strict=True)]
        return common.batch(whole), counts

    def end(self) -> None:
        """Say that this process takes no more batches in this epoch.

        Raises:
            ProcessesDisagree: If another process does.
        """
        self._gathered([])

    def _gathered(self, mine: list[Any]) -> list[list[Any]]:
        words = self._exchange.gather(mine)
        if all(map(bool, words)) or not any(words):
            return words
        ended = next(rank for rank, word in enumerate(words) if not word)
        other = next(rank for rank, word in enumerate(words) if word)
        raise ProcessesDisagree(
            f"Process {ended} has left an epoch, but process {other} continues, and a step "
            "needs every process.\nStop every process after the same step (decide from the "
            "logs, not from a clock).\nThe weights are those after the last common step."
        )

    def of_all(self, mine: bytes) -> list[np.ndarray]:
        """Return the bytes of every process, given those of this one."""
        sizes = self.numbers(len(mine))
        return current().gather(np.frombuffer(mine, "uint8").copy(), sizes)

    def close(self) -> None:
        """Release the exchange: no batch follows for some time."""
        self._exchange.close()

    def _common(self, names: list[str]) -> Form:
        """Return the form of all batches.

        Raises:
            ProcessesDisagree: If there are two.
        """
        ranks = [rank for rank, name in enumerate(names) if name]
        first = ranks[0]
        for rank in ranks:
            if names[rank] != names[first]:
                one, other = self._forms[names[first]], self._forms[names[rank]]
                what = f"{other.words()} in process {rank}, and {one.words()} in process {first}"
                if one.leaves == other.leaves:
                    what = f"a different structure in process {rank} than in process {first}"
                raise ProcessesDisagree(
                    f"The rows of a batch have {what}:\n"
                    "they cannot form one global batch. Use the same types and shapes in every "
                    "process, for example by padding to a fixed length."
                )
        return self._forms[names[first]]

    def _compare_first(self, words: list[list[Any]]) -> None:
        """Warn if two processes begin with the same rows."""
        if self._warn is None or current().rank:
            return
        checks = [check for *_, check, _ in words]
        for rank, mine in enumerate(checks):
            for other, theirs in enumerate(checks[:rank]):
                both = min(len(mine), len(theirs))
                if both and mine[both - 1] == theirs[both - 1]:
                    rows = counted(2 ** (both - 1), "row")
                    self._warn(
                        f"Processes {other} and {rank} begin with the same {rows}, so these "
                        "rows count twice. Were the data sharded?\nprocess_local is for data in "
                        "which each process has different rows, such as x[rank::size]."
                    )
                    return


def _digests(arrays: list[np.ndarray], rows: int) -> list[str]:
    """Return digests of the first 1, 2, 4, ... rows: processes may have other numbers of rows."""
    several = [2**power for power in range(rows.bit_length())]
    return [digest([_bytes_of(array[:most]).data for array in arrays]) for most in several]


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view("uint8")


def _packed(arrays: list[np.ndarray], size: int) -> np.ndarray:
    packed, start = np.empty(size, "uint8"), 0
    for array in arrays:
        part = _bytes_of(array)
        packed[start : start + len(part)] = part
        start += len(part)
    return packed
