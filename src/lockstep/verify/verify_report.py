"""A table of the result of verify."""

import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.counted import counted
from lockstep.json_numbers import finite
from lockstep.verify.verification import Difference, Verification

LINES = 12


def show_verification(found: Verification, console: Console | None = None) -> None:
    """Print the result of `verify`: a table, then the verdict in words."""
    console = console or Console()
    smallest, largest = found.rows
    rows = counted(largest, "row")
    if smallest != largest:
        rows = f"{smallest} to {rows}"
    console.print(
        f"{found.backend}: {counted(found.steps, 'step')} of {rows}, on one device and on "
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
    words = {
        "equal": f"{len(found.devices)} devices give what one device gives.",
        "different": f"[red]They differ from step {found.first_step} on.[/red]",
        "cannot tell": "[red]The comparison cannot tell whether they give the same.[/red]",
    }
    cause = f" {escape(found.cause)}" if found.cause else ""
    console.print(words[found.verdict] + cause, highlight=False)


def as_json(found: Verification) -> str:
    """The result as JSON. JSON has no infinity or NaN: these are the strings "inf" and "nan"."""
    return json.dumps(finite(found.as_dict()), indent=2, allow_nan=False)


def _word(difference: Difference) -> str:
    if difference.first_step is not None:
        return f"[red]from step {difference.first_step}[/red]"
    if difference.by_rounding:
        return "rounding, as on one device"
    return ""
