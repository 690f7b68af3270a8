"""One stream of output from several processes: process 0 plain, the others with a prefix."""

import codecs
import sys
from collections import deque
from typing import IO

import click

LAST_LINES = 20
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_red")


class Output:
    """The output of one process.

    Args:
        rank: The number of the process. The output of process 0 is passed on as it comes.
        stream: Where to write it.

    Attributes:
        last: The last lines.
    """

    def __init__(self, rank: int, stream: IO[str]) -> None:
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._stream = stream
        self._begun = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        colour = _COLOURS[(rank - 1) % len(_COLOURS)]
        self._prefix = click.style(f"[{rank}] ", fg=colour) if rank else None

    def write(self, data: bytes) -> None:
        """Pass on what the process has written."""
        if self._prefix is None:
            buffer = getattr(self._stream, "buffer", None)
            if buffer is None:  # the output of a notebook
                self._stream.write(self._decoder.decode(data))
            else:
                buffer.write(data)
            self._stream.flush()
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            self._write_line(line)

    def close(self) -> None:
        """Pass on a last line without an end."""
        if self._begun:
            self._write_line(self._begun)
            self._begun = b""

    def _write_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]  # a progress bar
        self.last.append(text)
        if self._prefix is not None:
            click.echo(self._prefix + text, file=self._stream)


def print_line(text: str) -> None:
    """Print a line of the launcher itself, to stderr."""
    click.secho(f"lockstep run: {text}", file=sys.stderr, bold=True)
