"""Reports of an inspection and of a rescue, for users and for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.counted import counted
from lockstep.errors import printable


@dataclass(frozen=True)
class Row:
    """One array: its old and new paths, and whether both hold exactly the same numbers."""

    source: str
    target: str
    shape: tuple[int, ...]
    equal: bool
    converted: bool = False


@dataclass(frozen=True)
class Rescued:
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

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


def show_rescued(report: Rescued, console: Any) -> None:
    """Print a report on a rich console; names from the file are escaped."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in ("in the old file", "in the new file", "shape", "equal"):
        table.add_column(title, overflow="fold")
    for row in report.rows:
        equal = ("yes, converted" if row.converted else "yes") if row.equal else "NO: rounded"
        shape = " x ".join(map(str, row.shape)) or "scalar"
        table.add_row(*(Text(printable(one)) for one in (row.source, row.target, shape, equal)))
    console.print(table)
    what = "a single model"
    if report.template is not None:
        over = f" over {counted(report.devices, 'device')}" if report.devices else ""
        what = f"the template {report.template!r} of a parallel model{over}"
    lines = [f"{report.source}: {what}, {report.library}", f"decided by {'; '.join(report.rules)}"]
    if report.optimizer != "none":
        lines.append(f"optimizer state {report.optimizer}")
    lines += [f"note: {note}" for note in report.notes]
    if report.difference is not None:
        lines.append(f"outputs: largest difference {report.difference:.2g}")
    count, equal_rows = len(report.rows), sum(row.equal for row in report.rows)
    lines.append(f"{report.output}: {equal_rows} of {counted(count, 'weight')} read back, equal")
    for line in lines:
        console.print(Text(printable(line)))


@dataclass(frozen=True)
class Entry:
    """One array of a file."""

    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Inspection:
    """The findings about a file, and the command that makes it usable.

    Attributes:
        path: The file.
        kind: `"keras2"` (HDF5 with layer groups), `"keras"`, `"weights.h5"`, `"torch"`,
            `"safetensors"` or `"named arrays"`.
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
        needs: Lambda layers whose code the user must give.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as plain values, for `--json`."""
        return asdict(self)


def show_inspection(found: Inspection, console: Any) -> None:
    """Print findings on a rich console; names from the file are escaped."""
    from rich.text import Text
    from rich.tree import Tree

    def line(text: str, style: str = "", soft_wrap: bool = False) -> None:
        console.print(Text(printable(text), style), soft_wrap=soft_wrap)

    what = {True: "parallel", False: "single device", None: "parallel or single (see below)"}
    over = f" over {counted(found.devices, 'device')}" if found.devices else ""
    inside = f", template {found.template!r}" if found.template else ""
    line(found.path, "bold")
    line(f"  written by  {found.library}")
    line(f"  holds       {found.contents}, {counted(len(found.arrays), 'array')}")
    line(f"  model       {what[found.parallel]}{over}{inside}")
    extras = [name for name, there in (("optimizer state", found.optimizer),
                                       ("loss and metrics", found.compiled)) if there]  # fmt: skip
    line(f"  also        {', '.join(extras) or 'no optimizer state'}")
    line(f"  state       {'complete' if found.complete else f'DAMAGED: {found.flaw}'}")
    if found.needs:
        line(f"  needs       {', '.join(found.needs)} (your code)")
    for note in found.notes:
        line(f"  note        {note}")
    tree = Tree("weights", hide_root=True)
    places: dict[str, Any] = {"": tree}
    for entry in found.arrays:
        parts = entry.path.split("/")
        for depth in range(1, len(parts)):
            here = "/".join(parts[:depth])
            if here not in places:
                above = places["/".join(parts[: depth - 1])]
                places[here] = above.add(Text(printable(parts[depth - 1])))
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        leaf = Text(printable(f"{parts[-1]}  {shape}  {entry.dtype}"))
        places["/".join(parts[:-1])].add(leaf)
    console.print(tree)
    line(f"next: {found.command}", "bold", soft_wrap=True)
