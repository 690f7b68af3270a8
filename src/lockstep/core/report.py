"""What every report of lockstep can do: print, show in a notebook, become JSON."""

from __future__ import annotations

import io
import json
import math
import sys
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 100
"""Characters of a line in a notebook."""

_IN_A_PIPE = 10_000
"""Characters of a line where no terminal wraps it: names and paths stay whole."""


def console() -> Console:
    """Return a console for a report; in a pipe or a file, nothing is cut or wrapped."""
    from rich.console import Console

    shown = Console(highlight=False)
    return shown if shown.is_terminal else Console(highlight=False, width=_IN_A_PIPE)


def table(*heads: str) -> Table:
    """Return a table in which a name that is too long is wrapped, and never cut."""
    from rich.table import Table

    made = Table()
    for head in heads:
        made.add_column(head, overflow="fold")
    return made


class Report(ABC):
    """What a function of lockstep found, for people, notebooks and programs."""

    @abstractmethod
    def __str__(self) -> str:
        """The result in a sentence or two."""

    @abstractmethod
    def show(self, console: Console) -> None:
        """Print the whole report on a rich console."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report, which is a data class, as plain lists, numbers and strings."""
        return asdict(cast(Any, self))

    def as_json(self) -> str:
        """Return the report as JSON; a number that is not finite is the string "inf" or "nan"."""
        return json.dumps(_finite(self.as_dict()), indent=2, allow_nan=False)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from rich.console import Console

        # In a notebook, a console of rich shows what it prints; only the HTML is wanted.
        shown = Console(
            record=True, width=WIDTH, file=io.StringIO(), highlight=False, force_jupyter=False
        )
        self.show(shown)
        return shown.export_html(
            inline_styles=True, code_format='<pre style="line-height: normal">{code}</pre>'
        )


def _finite(value: Any) -> Any:
    """Return lists and dicts with the strings "inf" and "nan" for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_finite, value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


NARROW = 80
"""Characters of a line below which a table that does not fit is printed as lines."""


def print_table(console: Console, table: Table, narrow: int = NARROW) -> None:
    """Print a table; on a narrow console that cannot hold it, each row is a line.

    Nothing is cut: the first column, which has the names, wraps.

    Args:
        console: The console.
        table: The table.
        narrow: Characters of a line below which a console is narrow.
    """
    table.columns[0].overflow = "fold"
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    if console.width >= narrow or needed <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(table.title, soft_wrap=True, highlight=False)
    heads = [str(column.header) for column in table.columns]
    for name, *cells in zip(*(column.cells for column in table.columns), strict=True):
        facts = [
            f"{head} {cell}".strip()
            for head, cell in zip(heads[1:], cells, strict=True)
            if str(cell)
        ]
        console.print(f"{name}: {', '.join(facts)}", soft_wrap=True, highlight=False)


def stdout_for(as_json: bool) -> AbstractContextManager[Any]:
    """Send what the user's code prints to stderr if the command prints JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def print_report(report: Report, as_json: bool) -> None:
    """Print a report for a command: a table and words, or JSON."""
    if as_json:
        print(report.as_json())
    else:
        report.show(console())
