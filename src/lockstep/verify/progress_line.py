"""A progress line on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_line(name: str, steps: int) -> Iterator[Callable[[], None]]:
    """Show a line on stderr while a run is under way, if stderr is a terminal.

    The line is drawn after each step, by the caller's own thread. It disappears at the end.

    Args:
        name: What runs.
        steps: How many steps it has.

    Yields:
        A function to call after each step.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        task = progress.add_task(name, total=steps)
        progress.refresh()
        yield lambda: progress.update(task, advance=1, refresh=True)
