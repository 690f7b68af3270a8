"""A table of what verify found."""

import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.report.numbers import finite
from lockstep.verification import Difference, Verification

LINES = 12


def show_verification(found: Verification, console: Console | None = None) -> None:
    """Print what `verify` found: a table, then a verdict in words."""
    console = console or Console()
    smallest, largest = found.rows
    rows = f"{largest}" if smallest == largest else f"{smallest} to {largest}"
    console.print(
        f"{found.backend}: {found.steps} steps of {rows} rows, on one device and on "
        f"{len(found.devices)}; "
        f"rounding measured on one device with {found.control}.",
        highlight=False,
    )
    table = Table("", "largest difference", "bound", "")
    for difference in found.differences[:LINES]:
        table.add_row(
            escape(difference.name),
            f"{difference.largest:.1e}",
            f"{difference.bound:.1e}",
            _word(difference),
        )
    if len(found.differences) > LINES:
        rest = found.differences[LINES:]
        table.add_row(f"{len(rest)} more", f"at most {max(d.largest for d in rest):.1e}", "", "")
    console.print(table)
    for note in found.notes:
        console.print(escape(note), highlight=False)
    if found.equal:
        console.print(f"{len(found.devices)} devices give what one device gives.", highlight=False)
    else:
        verdict = "It cannot be told whether they give the same."
        if found.first_step is not None:
            verdict = f"They part at step {found.first_step}."
        console.print(f"[red]{verdict}[/red] {escape(found.cause or '')}")


def as_json(found: Verification) -> str:
    """The same as JSON, which knows no infinity: such a number is the string "inf" or "nan"."""
    return json.dumps(finite(found.as_dict()), indent=2, allow_nan=False)


def _word(difference: Difference) -> str:
    if difference.first_step is not None:
        return f"[red]from step {difference.first_step}[/red]"
    if difference.by_rounding:
        return "rounding, as on one device"
    return ""
