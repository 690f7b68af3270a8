"""The manifest of a checkpoint: one JSON file with its own checksum."""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.array_file import Entry
from lockstep.core.files import write_file
from lockstep.errors import DamagedCheckpoint, NewerCheckpoint

FILE = "manifest.json"
FORMAT = "lockstep checkpoint"
VERSION = 1
"""The version of the format. It grows if an older reader would misread the file."""


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint besides its arrays.

    Attributes:
        state: The state of the run, in plain JSON.
        entries: The arrays, in the order of their bytes.
        checks: The CRC-32 of each array.
    """

    state: dict[str, Any]
    entries: list[Entry]
    checks: list[int]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a folder, and return when the disk has it."""
    arrays = [
        {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape), "crc32": check}
        for entry, check in zip(manifest.entries, manifest.checks, strict=True)
    ]
    content = {"format": FORMAT, "version": VERSION, "state": manifest.state, "arrays": arrays}
    content["crc32"] = _check(content)
    write_file(folder / FILE, [json.dumps(content, indent=1).encode()])


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest in a folder.

    Raises:
        DamagedCheckpoint: If it is missing, or its checksum differs.
        NewerCheckpoint: If a newer lockstep wrote it, in an unknown format.
    """
    path = folder / FILE
    try:
        content = json.loads(path.read_bytes())
        said = content.pop("crc32")
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        if content["version"] <= VERSION and said != _check(content):
            raise ValueError("its checksum differs from the one that was written")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}.") from error
    check_version(path, content["version"])
    arrays = content["arrays"]
    entries = [Entry(each["name"], each["dtype"], tuple(each["shape"])) for each in arrays]
    return Manifest(content["state"], entries, [each["crc32"] for each in arrays])


def check_version(path: Path, version: int) -> None:
    """Check the format version of a file.

    Raises:
        NewerCheckpoint: If the version is newer than this lockstep.
    """
    if version > VERSION:
        raise NewerCheckpoint(
            f"{path} has format version {version}, but this version of lockstep reads only up "
            f"to {VERSION}.\n"
            "Upgrade with: pip install -U keras-lockstep, or train into a different folder."
        )


def _check(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
