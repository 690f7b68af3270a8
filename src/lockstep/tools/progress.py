"""The line on stderr that shows which run is under way, and how far it is."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[str, int], None]
"""Called with what runs, and the number of steps that are done since the last call."""

SILENT = 10.0
"""Seconds after which a line follows, where there is no terminal."""

TOO_FEW = 0.02
"""The part of the steps from which the time left is told: the first one compiles."""


@contextmanager
def progress(steps: int, *, lines: bool = False, of: str = "steps") -> Iterator[Advance]:
    """Show a bar on stderr if it is a terminal. The bar disappears at the end.

    It is drawn after each step, by the caller's own thread.

    Args:
        steps: The number of steps of everything.
        lines: Whether to print a line now and then where stderr is no terminal.
        of: What is counted.

    Yields:
        The function to call after each step.
    """
    if not sys.stderr.isatty():
        yield _lines(steps) if lines else lambda run, more: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeRemainingColumn(),
        MofNCompleteColumn(),
        TextColumn(of),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as shown:
        bar = shown.add_task("", total=steps)
        yield lambda run, more: shown.update(bar, advance=more, description=run, refresh=True)


def _lines(steps: int) -> Advance:
    start = said = time.monotonic()
    now, done = "", 0

    def advance(run: str, more: int) -> None:
        nonlocal said, now, done
        done += more
        passed, known = time.monotonic() - start, TOO_FEW * steps < done < steps
        if run != now or time.monotonic() - said > SILENT:
            left = f", about {passed / done * (steps - done):.0f} s left" if known else ""
            print(f"{run} ...{left}", file=sys.stderr, flush=True)
            said, now = time.monotonic(), run

    return advance
