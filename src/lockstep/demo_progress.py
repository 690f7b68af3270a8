"""The line of the demo that shows what runs, and how much time is left."""

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
def progress(steps: int) -> Iterator[Advance]:
    """Show a bar with the time left; where there is no terminal, a line now and then.

    Args:
        steps: The number of steps of everything.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console()
    if not console.is_terminal:
        yield _lines(steps)
        return
    columns = (
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        bar = shown.add_task("", total=steps)
        yield lambda run, more: shown.update(bar, advance=more, description=run)


def _lines(steps: int) -> Advance:
    start = said = time.monotonic()
    now, done = "", 0

    def advance(run: str, more: int) -> None:
        nonlocal said, now, done
        done += more
        passed, known = time.monotonic() - start, TOO_FEW * steps < done < steps
        if run != now or time.monotonic() - said > SILENT:
            left = f", about {passed / done * (steps - done):.0f} s left" if known else ""
            print(f"{run} ...{left}", flush=True)
            said, now = time.monotonic(), run

    return advance
