"""A table of what verify found."""

import json
import math
from typing import Any

from rich.console import Console
from rich.table import Table

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
            difference.name,
            f"{difference.largest:.1e}",
            f"{difference.bound:.1e}",
            _word(difference),
        )
    if len(found.differences) > LINES:
        rest = found.differences[LINES:]
        table.add_row(f"{len(rest)} more", f"at most {max(d.largest for d in rest):.1e}", "", "")
    console.print(table)
    for note in found.notes:
        console.print(note, highlight=False)
    if found.equal:
        console.print(f"{len(found.devices)} devices give what one device gives.", highlight=False)
    else:
        console.print(f"[red]They part at step {found.first_step}.[/red] {found.cause}")


def as_json(found: Verification) -> str:
    """The same as JSON, which knows no infinity: such a number is the string "inf" or "nan"."""
    return json.dumps(_finite(found.as_dict()), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_finite, value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _word(difference: Difference) -> str:
    if difference.first_step is not None:
        return f"[red]from step {difference.first_step}[/red]"
    if difference.by_rounding:
        return "rounding, as on one device"
    return ""
