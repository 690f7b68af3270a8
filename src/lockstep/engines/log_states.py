"""How far the file of a `CSVLogger` is, and the rows in it that a run makes once more."""

import csv
import zlib
from pathlib import Path
from typing import Any


def log_of(logger: Any) -> dict[str, Any]:
    """What is in the file of a `CSVLogger`: how many bytes, and their checksum."""
    file = logger.csv_file
    size = file.tell() if file is not None else 0
    content = _content(logger)
    check = None if content is None else zlib.crc32(content[:size])
    return {"bytes": size, "crc32": check, "keys": logger.keys}


def cut_log(logger: Any, state: dict[str, Any]) -> list[str]:
    """Take away the rows that the file has from after a checkpoint; none that are not the run's.

    Returns:
        What a user has to know, in words.
    """
    # keras/src/callbacks/csv_logger.py: opened to append by now.
    size, content = state["bytes"], _content(logger)
    known = content is not None and zlib.crc32(content[:size]) == state.get("crc32")
    if content is None or len(content) < size or not known:
        return [f"{logger.filename} is not as it was, and rows are appended"]
    rows = _epochs(logger, content[:size]), _epochs(logger, content[size:])
    if None in rows[1] or rows[1] != list(range(_next(*rows), _next(*rows) + len(rows[1]))):
        return [f"{logger.filename} has rows of another run, and rows are appended"]
    with open(logger.filename, "r+b") as file:
        file.truncate(size)
    logger.append_header = size == 0
    logger.keys = state["keys"]
    return []


def _next(before: list[int | None], after: list[int | None]) -> int:
    """The epoch that the run's own next row is of."""
    if before and before[-1] is not None:
        return before[-1] + 1
    return after[0] if after and after[0] is not None else 0


def _epochs(logger: Any, content: bytes) -> list[int | None]:
    """The epoch of each row but the header, `None` for what is no row of a log."""
    text = content.decode(errors="replace").splitlines()
    cells = [row[0] for row in csv.reader(text, delimiter=logger.sep) if row]
    if cells[:1] == ["epoch"]:
        del cells[0]
    return [int(cell) if cell.isdecimal() else None for cell in cells]


def _content(logger: Any) -> bytes | None:
    try:
        return Path(logger.filename).read_bytes()
    except OSError:  # in a store that is no folder, say
        return None
