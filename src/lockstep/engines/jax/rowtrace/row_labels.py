"""How the values of a traced program depend on the rows of a batch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax

DATA, UNIFORM, FALSE, NUMBER, COLUMNS = "data", "uniform", "false", "number", "columns"


@dataclass(frozen=True)
class Place:
    """An operation of the program.

    Attributes:
        layer: The path of the layer; empty outside any layer.
        operation: The name of JAX's primitive.
        line: The line of the user's code, as "train.py:12"; empty if only Keras's code is there.
    """

    layer: str
    operation: str
    line: str

    def __str__(self) -> str:
        line = f" ({self.line})" if self.line else ""
        return f"{self.layer}: {self.operation}{line}" if self.layer else f"{self.operation}{line}"


@dataclass(frozen=True)
class Same:
    """A value that is the same for all rows and for all numbers of rows.

    Attributes:
        value: The value of a scalar, if it is known while the program is traced.
    """

    value: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Rows:
    """An array whose entries each depend on one row.

    Attributes:
        dim: The dim of the rows. Its index is `(outer index * rows + row) * each + each index`.
        outer: The number of times that all rows stand one after the other in the dim.
        each: The number of adjacent entries of one row in the dim.
        content: `DATA`; `UNIFORM`: all entries of the dim are equal; `FALSE`: and they are false;
            `NUMBER`: the number of the row; `COLUMNS`: an index with that number in `columns`.
        columns: The columns of the last dim that hold the number of the row.
    """

    dim: int
    outer: int = 1
    each: int = 1
    content: str = DATA
    columns: frozenset[int] = frozenset()

    @property
    def joins(self) -> bool:
        """Whether the parts of a batch, concatenated along dim 0, are the whole."""
        return self.dim == 0 and self.outer == 1


@dataclass(frozen=True)
class Row:
    """In one step of a loop over rows: a value that depends on the row of this step.

    Attributes:
        outer: As in `Rows`, of the dim that the loop runs over.
        each: As in `Rows`.
    """

    outer: int
    each: int


@dataclass(frozen=True)
class Count:
    """A value made of the number of rows alone.

    Attributes:
        values: The value of a scalar for each traced number of rows, if they are known.
    """

    values: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Total:
    """A sum over rows of values that depend on one row each, times the number of rows ** `power`.

    Attributes:
        power: 0 is a sum over rows, -1 a mean.
        place: The operation that sums.
    """

    power: int
    place: Place

    @property
    def is_sum(self) -> bool:
        """Whether the sum over the parts is the value of the whole batch."""
        return self.power == 0

    @property
    def is_mean(self) -> bool:
        """Whether the mean over the parts, weighted by rows, is the value of the whole batch."""
        return self.power == -1


@dataclass(frozen=True)
class Mixed:
    """A value that depends on several rows, or may do so.

    Attributes:
        place: The first operation that combines rows.
        why: What it does, as "over rows".
    """

    place: Place
    why: str

    def __str__(self) -> str:
        line = f" ({self.place.line})" if self.place.line else ""
        return f"{replace(self.place, line='')} {self.why}{line}"


Label = Same | Rows | Row | Count | Total | Mixed

SAME = Same()


@dataclass(frozen=True)
class Draw:
    """A draw of random numbers.

    Attributes:
        place: The operation. `random_bits` makes counters of the entries' numbers;
            `random_split`, `random_gamma` and `rng_bit_generator` do not.
        rows: The dim of the rows and their order in it; `None` if the size does not depend on rows.
        key: The type of its key, such as "key<fry>".
        shapes: The shape that one key draws, for each traced number of rows.
        bits: The bits of each number; `None` if the operation is not `random_bits`.
    """

    place: Place
    rows: Rows | None
    key: str
    shapes: tuple[tuple[int, ...], ...]
    bits: int | None

    @property
    def entries(self) -> int:
        """The numbers drawn for each row; 0 if the size does not depend on rows."""
        if self.rows is None:
            return 0
        entries = self.rows.outer * self.rows.each
        for dim, size in enumerate(self.shapes[0]):
            entries *= 1 if dim == self.rows.dim else size
        return entries


@dataclass(frozen=True)
class RowTrace:
    """How a program's results depend on its rows. Each tree has labels in the places of arrays.

    Attributes:
        outputs: The tree of `Same`, `Rows` and `Mixed`. `Rows.joins` tells whether the outputs of
            parts can be concatenated. No label is `Total` or `Count`: both are `Mixed` here.
        terms: The tree of `Same`, `Total` with power 0 (sum) or -1 (mean), and `Mixed` (neither).
        state: The tree of `Same`, where every part computes the same value, and `Mixed`.
        draws: The draws of random numbers, in the program's order.
        trusted: The operations of which the labels do not tell all: a gradient or a function of the
            user's own, or one that is not known. Values have to be compared for these.
        programs: For each number of rows the function as it was traced.
    """

    outputs: Any
    terms: Any
    state: Any
    draws: tuple[Draw, ...]
    trusted: tuple[Place, ...] = ()
    programs: dict[int, Callable[..., Any]] = field(default_factory=dict)

    @property
    def mixed(self) -> list[Mixed]:
        """The results that depend on several rows: of the outputs, the terms, and the state."""
        results = jax.tree.leaves((self.outputs, self.terms, self.state))
        return [label for label in results if isinstance(label, Mixed)]


class RowsMeet(Exception):
    """An operation combines rows; its text ends a sentence that begins with the operation."""


def rows_among(labels: Iterable[Label]) -> list[Rows]:
    """Return the labels that are `Rows`."""
    return [label for label in labels if isinstance(label, Rows)]


def aligned(labels: Iterable[Label]) -> Rows:
    """Return the label of entries computed from arrays whose rows have the same places.

    Raises:
        RowsMeet: If the rows have different places.
    """
    rows = rows_among(labels)
    firm = next((each for each in rows if each.content not in (UNIFORM, FALSE)), rows[0])
    for each in rows:
        if each.dim != firm.dim or not same_places(each, firm):
            raise RowsMeet("with rows in different dims")
    return replace(firm, content=DATA if firm.content == DATA else UNIFORM, columns=frozenset())


def same_places(one: Rows, other: Rows) -> bool:
    """Whether an entry of one dim belongs to the row of the same entry of the other."""
    if UNIFORM in (one.content, other.content) or FALSE in (one.content, other.content):
        return one.outer * one.each == other.outer * other.each
    return (one.outer, one.each) == (other.outer, other.each)


def joined(one: Label, other: Label, place: Place) -> Label:
    """Return the label of a value that is one or the other, as in a loop or a branch."""
    if isinstance(one, Same) and isinstance(other, Same):
        return SAME
    for first, second in ((one, other), (other, one)):
        if isinstance(first, Mixed) or first == second:
            return first
        if isinstance(first, Row) and isinstance(second, Same):
            return first
        if isinstance(first, Rows) and isinstance(second, Rows) and first.content == DATA:
            uniform = second.content in (UNIFORM, FALSE)
            if uniform and first.dim == second.dim and same_places(first, second):
                return first
        if isinstance(first, Count) and isinstance(second, Count | Same):
            return Count()
    return Mixed(place, "combines values that depend on the rows in different ways")


def changeable(label: Label) -> Label:
    """Return the label of a value that may change, as the carry of a loop."""
    if isinstance(label, Same | Count):
        return type(label)()
    if isinstance(label, Rows) and label.content not in (NUMBER, COLUMNS):
        return replace(label, content=UNIFORM if label.content != DATA else DATA)
    return label


def in_one_step(label: Label, place: Place) -> Label:
    """Return the label, in one step of a loop, of an array that the loop runs over."""
    if isinstance(label, Rows) and label.dim == 0:
        if label.content == DATA:
            return Row(label.outer, label.each)
        if label.content in (UNIFORM, FALSE):
            return SAME
        return Mixed(place, "computes with the indices of the rows")
    return replace(label, dim=label.dim - 1) if isinstance(label, Rows) else label
