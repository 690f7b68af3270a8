"""Reports of an inspection and of a rescue, for users and for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.core.report import Report, print_table
from lockstep.errors import counted, printable

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Row:
    """One array: its old and new paths, and whether both hold exactly the same numbers."""

    source: str
    target: str
    shape: tuple[int, ...]
    equal: bool
    converted: bool = False


@dataclass(frozen=True)
class Rescued(Report):
    """The report of a rescue.

    Every row was read back from the written file, or from the live model, and compared
    with the old array.

    Attributes:
        source: The old file.
        output: The written file.
        library: The library that wrote the old file.
        template: Name of the single model inside a parallel file; None for a single model.
        devices: Number of devices of the parallel model, if known.
        rules: The rules that assigned arrays to variables.
        rows: The table of weights.
        optimizer: `"carried"`, `"dropped"`, or `"none"` where the file has none.
        compiled: Whether the written model is compiled.
        difference: Largest difference of outputs, if `check` was given.
        notes: Further information for the user.
    """

    source: str
    output: str
    library: str
    template: str | None
    devices: int | None
    rules: tuple[str, ...]
    rows: tuple[Row, ...]
    optimizer: str
    compiled: bool
    difference: float | None
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """Where the weights are now, and whether each holds the old numbers."""
        return printable(f"{self._counts()}; {'; '.join([self._model(), *self._state()])}.")

    def show(self, console: Console) -> None:
        """Print the report; names from the file are escaped."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        for title in ("in the old file", "in the new file", "shape", "equal"):
            table.add_column(title, overflow="fold")
        for row in self.rows:
            equal = ("yes, converted" if row.converted else "yes") if row.equal else "NO: rounded"
            cells = (row.source, row.target, _dims(row.shape), equal)
            table.add_row(*(Text(printable(cell)) for cell in cells))
        print_table(console, table)
        lines = [self._model(), f"decided by {'; '.join(self.rules)}", *self._state()]
        lines += [f"note: {note}" for note in self.notes]
        if self.difference is not None:
            lines.append(f"outputs: largest difference {self.difference:.2g}")
        lines.append(self._counts())
        for line in lines:
            console.print(Text(printable(line)), soft_wrap=True)

    def _counts(self) -> str:
        equal = sum(row.equal for row in self.rows)
        return f"{self.output}: {equal} of {counted(len(self.rows), 'weight')} read back, equal"

    def _model(self) -> str:
        what = "a single model"
        if self.template is not None:
            over = f" over {counted(self.devices, 'device')}" if self.devices else ""
            what = f"the template {self.template!r} of a parallel model{over}"
        return f"{self.source}: {what}, {self.library}"

    def _state(self) -> list[str]:
        return [] if self.optimizer == "none" else [f"optimizer state {self.optimizer}"]


@dataclass(frozen=True)
class Entry:
    """One array of a file."""

    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Inspection(Report):
    """The findings about a file, and the command that makes it usable.

    Attributes:
        path: The file.
        kind: `"keras2"` (HDF5 with layer groups), `"keras"` or `"weights.h5"`.
        library: The library that wrote the file, if known.
        contents: `"full model"`, `"weights"` or `"nothing"`.
        parallel: Whether the file is of a model over several devices; None if unknown.
        devices: Number of devices, if known.
        template: Name of the single model inside a parallel one.
        complete: Whether everything that the file lists is present.
        flaw: Description of the missing or unreadable part, if any.
        optimizer: Whether the file holds optimizer state.
        compiled: Whether the file holds loss and metrics.
        arrays: All arrays of weights, in file order.
        needs: Lambda layers and own classes, whose code the user must give.
        command: The command that makes the file usable.
        notes: Further information for the user.
    """

    path: str
    kind: str
    library: str
    contents: str
    parallel: bool | None
    complete: bool
    command: str
    devices: int | None = None
    template: str | None = None
    flaw: str | None = None
    optimizer: bool = False
    compiled: bool = False
    arrays: tuple[Entry, ...] = ()
    needs: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        """What the file is, and the command that makes it usable."""
        return printable(
            f"{self.path}: {self.contents}, {self._model()}, {self.library}; {self._state()}. "
            f"Next: {self.command}"
        )

    def show(self, console: Console) -> None:
        """Print the findings; names from the file are escaped."""
        from rich.text import Text
        from rich.tree import Tree

        def line(text: str, style: str = "", soft_wrap: bool = False) -> None:
            console.print(Text(printable(text), style), soft_wrap=soft_wrap)

        inside = f", template {self.template!r}" if self.template else ""
        extras = ["optimizer state"] * self.optimizer + ["loss and metrics"] * self.compiled
        line(self.path, "bold", soft_wrap=True)
        line(f"  written by  {self.library}")
        line(f"  holds       {self.contents}, {counted(len(self.arrays), 'array')}")
        line(f"  model       {self._model()}{inside}")
        line(f"  also        {', '.join(extras) or 'no optimizer state'}")
        line(f"  state       {self._state()}")
        if self.needs:
            line(f"  needs       {', '.join(self.needs)} (your code)")
        for note in self.notes:
            line(f"  note        {note}")
        tree = Tree("weights", hide_root=True)
        places: dict[str, Tree] = {}
        for entry in self.arrays:
            here, above = "", tree
            *folders, last = entry.path.split("/")
            for folder in folders:
                here = f"{here}/{folder}"
                if here not in places:
                    places[here] = above.add(Text(printable(folder)))
                above = places[here]
            above.add(Text(printable(f"{last}  {_dims(entry.shape)}  {entry.dtype}")))
        console.print(tree)
        line(f"next: {self.command}", "bold", soft_wrap=True)

    def _model(self) -> str:
        what = {True: "parallel", False: "single device", None: "parallel or single (see notes)"}
        over = f" over {counted(self.devices, 'device')}" if self.devices else ""
        return f"{what[self.parallel]}{over}"

    def _state(self) -> str:
        return "complete" if self.complete else f"DAMAGED: {self.flaw}"


def _dims(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
