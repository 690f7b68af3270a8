"""What a rescue did, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One array: where it was, where it is, and whether both are equal bit for bit."""

    source: str
    target: str
    shape: tuple[int, ...]
    equal: bool
    converted: bool = False


@dataclass(frozen=True)
class Rescued:
    """The proof of a rescue.

    Every row was read back from the written file and compared with the old one.

    Attributes:
        source: The old file.
        output: The written file.
        library: Which library wrote the old file.
        template: Name of the single model inside a parallel file; None for a single one.
        devices: Devices of the parallel model, where that can be known.
        rules: What decided which array belongs to which variable.
        rows: The table of weights.
        optimizer: `"carried"`, `"dropped"`, or `"none"` where the file has none.
        compiled: Whether the written model is compiled as the old one was.
        difference: Largest difference of outputs, where inputs and outputs were given.
        notes: What else the user should know.
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
        """The report as plain values."""
        return asdict(self)


def show(report: Rescued, console: Any) -> None:
    """Print a report on a rich console."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("in the old file", "in the new file", "shape", "equal"):
        table.add_column(title, overflow="fold")
    for row in report.rows:
        said = "yes, converted" if row.converted else "yes"
        shape = " x ".join(map(str, row.shape)) or "scalar"
        table.add_row(escape(row.source), escape(row.target), shape, said if row.equal else "NO")
    console.print(table)
    what = "a single model"
    if report.template is not None:
        over = f" over {report.devices} devices" if report.devices else ""
        what = f"the template {report.template!r} of a parallel model{over}"
    console.print(f"[bold]{escape(report.source)}[/]: {escape(what)}, {escape(report.library)}")
    console.print(f"decided by {escape('; '.join(report.rules))}")
    if report.optimizer != "none":
        console.print(f"optimizer state {report.optimizer}")
    for note in report.notes:
        console.print(f"note: {escape(note)}")
    if report.difference is not None:
        console.print(f"outputs: largest difference {report.difference:.2g}")
    count = len(report.rows)
    console.print(f"[bold]{escape(report.output)}[/]: {count} of {count} weights read back, equal")
