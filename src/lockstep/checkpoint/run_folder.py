"""The folder of one run: its checkpoints, each complete or absent, and which of them stay.

    runs/digits/
        lockstep.json                          the format of the folder
        00000007-epoch-0003-step-000120/       a checkpoint, after 120 steps of the third epoch
            manifest.json
            arrays.safetensors
        .writing-00000008-4711-9c2f11e0/       a checkpoint that is being written, or was at a kill
        lockstep.lock                          the process whose `fit` writes here

A checkpoint is written under a temporary name, and renamed when the disk has it. A checkpoint is
also renamed before it is removed.
"""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.checkpoint.array_file import Entry, read_arrays, write_arrays
from lockstep.checkpoint.manifest import (
    VERSION,
    Manifest,
    check_version,
    read_manifest,
    write_manifest,
)
from lockstep.core.files import is_temporary, remove_folder, replacing, sync_folder
from lockstep.errors import DamagedCheckpoint, NotARun, counted

_MARK = "lockstep.json"
_FORMAT = "lockstep run"
_ARRAYS = "arrays.safetensors"
_NAME = re.compile(r"(\d{8,})-epoch-\d+-step-\d+")
_ASIDE = re.compile(r"\.(writing|removing)-.+")


@dataclass(frozen=True)
class Found:
    """A checkpoint after it was read and checked.

    Attributes:
        path: Its folder.
        state: The state of the run.
        arrays: Its arrays by name.
    """

    path: Path
    state: dict[str, Any]
    arrays: dict[str, np.ndarray]


class RunFolder:
    """The checkpoints of one run.

    Attributes:
        path: The folder.
        left_over: A message about files that could not be removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left_over: str | None = None

    def open(self) -> None:
        """Make the folder, or check that it is the folder of a run.

        Raises:
            NotARun: If it is anything else.
            NewerCheckpoint: If a newer lockstep made it.
            OSError: If it cannot be made.
        """
        if self.check():
            return
        self.path.mkdir(parents=True, exist_ok=True)
        mark = {"format": _FORMAT, "version": VERSION}
        with replacing(self.path / _MARK) as temporary:
            temporary.write_bytes(json.dumps(mark).encode())

    def check(self) -> bool:
        """Return whether the folder has a run; `False` if it is missing or empty.

        Raises:
            NotARun: If it is anything else.
            NewerCheckpoint: If a newer lockstep made it.
            OSError: If it cannot be listed.
        """
        mark = self.path / _MARK
        try:
            said = json.loads(mark.read_bytes())
            version = said["version"] if said["format"] == _FORMAT else None
        except (FileNotFoundError, NotADirectoryError):
            if os.path.lexists(self.path) and not self.path.is_dir():
                raise NotARun(
                    f"The checkpoint folder {self.path} is a file or a broken link.\n"
                    "Name a folder that is new or empty."
                ) from None
            others = sorted(os.listdir(self.path)) if self.path.is_dir() else []
            others = [name for name in others if not is_temporary(name, mark)]
            if mark.name in others:  # another process of this run has just made it
                return self.check()
            if others:
                raise NotARun(
                    f"The folder {self.path} contains {others[0]!r}, but no lockstep run. "
                    "Nothing in it was changed.\nName a folder that is new or empty."
                ) from None
            return False
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NotARun(
                f"The checkpoint folder {self.path} cannot be used: its {mark.name} cannot be "
                f"read: {error}.\nName a folder that is new or empty."
            ) from error
        if version is None:
            raise NotARun(
                f"The checkpoint folder {self.path} cannot be used: the format of its "
                f"{mark.name} is not {_FORMAT!r}.\nName a folder that is new or empty."
            )
        check_version(mark, version)
        return True

    def marked(self) -> bool:
        """Return whether the file names the format of a run."""
        return (self.path / _MARK).exists()

    def checkpoints(self) -> list[Path]:
        """Return the folders of the checkpoints, newest first."""
        try:
            names = [name for name in os.listdir(self.path) if _NAME.fullmatch(name)]
        except FileNotFoundError:
            return []
        return [self.path / name for name in sorted(names, key=_number, reverse=True)]

    def newest(self, say: Callable[[str], None]) -> Found | None:
        """Return the newest undamaged checkpoint, or `None` if there are no checkpoints.

        Args:
            say: Called with a message for each damaged checkpoint.

        Raises:
            DamagedCheckpoint: If all of them are damaged.
            NewerCheckpoint: If a newer lockstep wrote one.
        """
        damaged: list[str] = []
        tried: set[Path] = set()
        # Listed each time: a running `fit` may remove one while it is read.
        while left := [path for path in self.checkpoints() if path not in tried]:
            path = left[0]
            tried.add(path)
            try:
                found = self.read(path)
            except DamagedCheckpoint as error:
                if path.exists():
                    damaged.append(str(error))
                continue
            for words in damaged:
                say(f"A damaged checkpoint was skipped: {words}\nUsed instead: {path.name}.")
            return found
        if damaged:
            raise DamagedCheckpoint(
                f"{self.path} has {counted(len(damaged), 'checkpoint')}, and all are damaged.\n"
                f"The newest: {damaged[0]}\nTo start again, choose a different folder."
            )
        return None

    def newest_end(self) -> Found | None:
        """Return the newest undamaged checkpoint at the end of an epoch, or `None`."""
        for path in self.checkpoints():
            with contextlib.suppress(DamagedCheckpoint):
                if not read_manifest(path).state["step"]:
                    return self.read(path)
        return None

    def read(self, path: Path) -> Found:
        """Return a checkpoint, after a check of every array.

        Raises:
            DamagedCheckpoint: If a file differs from the file that was written.
            NewerCheckpoint: If a newer lockstep wrote it.
        """
        manifest = read_manifest(path)
        arrays = read_arrays(path / _ARRAYS, manifest.entries, manifest.checks)
        return Found(path, manifest.state, arrays)

    def save(
        self, name: str, state: dict[str, Any], entries: list[Entry], arrays: Iterable[np.ndarray]
    ) -> Path:
        """Write a checkpoint. When this returns, the disk has it completely.

        Args:
            name: The name after its number, such as `epoch-0003-step-000120`.
            state: The state of the run, in plain JSON.
            entries: The descriptions of the arrays.
            arrays: The arrays, taken one at a time.

        Returns:
            Its folder.

        Raises:
            OSError: If it cannot be written. Earlier checkpoints do not change.
        """
        self.open()
        self._clear()
        there = self.checkpoints()
        number = _number(there[0].name) + 1 if there else 1
        aside, path = self._aside(f"writing-{number:08}"), self.path / f"{number:08}-{name}"
        try:
            os.mkdir(aside)
            checks = write_arrays(aside / _ARRAYS, entries, arrays)
            write_manifest(aside, Manifest(state, entries, checks))
            sync_folder(aside)
            os.rename(aside, path)
        except OSError:
            self._clear()  # a full disk needs the room
            raise
        sync_folder(self.path)
        return path

    def keep(self, paths: Iterable[Path]) -> None:
        """Remove all other checkpoints."""
        kept = set(paths)
        for path in self.checkpoints():
            if path not in kept:
                aside = self._aside(f"removing-{path.name}")
                with self._noting(path):
                    os.rename(path, aside)
                    remove_folder(aside)

    def _clear(self) -> None:
        """Remove incomplete checkpoints after a kill or a full disk."""
        for name in os.listdir(self.path):
            if _ASIDE.fullmatch(name):
                with self._noting(self.path / name):
                    remove_folder(self.path / name)

    @contextlib.contextmanager
    def _noting(self, path: Path) -> Iterator[None]:
        """Remove a folder. If that fails, the next save tries again."""
        try:
            yield
        except OSError as error:
            self.left_over = f"{path} could not be removed: {error}."

    def _aside(self, name: str) -> Path:
        """Return a temporary name that is unique to this process."""
        return self.path / f".{name}-{os.getpid()}-{secrets.token_hex(4)}"


@dataclass
class Retention:
    """The rule that selects the checkpoints to keep.

    Attributes:
        keep: Number of newest checkpoints to keep.
        best: Whether to keep the best checkpoint too.
        monitored: The name, value and mode of `monitor`, for each checkpoint that has them.
        broken: Checkpoints whose loss is not finite.
        ends: Checkpoints at the end of an epoch.
        keeps_end: Whether to keep the newest of them too.
    """

    keep: int
    best: bool
    monitored: dict[Path, dict[str, Any]] = field(default_factory=dict)
    broken: set[Path] = field(default_factory=set)
    ends: set[Path] = field(default_factory=set)
    keeps_end: bool = False

    def note(self, path: Path, state: dict[str, Any]) -> None:
        """Record the monitored value of a checkpoint, and whether its loss is finite."""
        monitor = state.get("monitor")
        if monitor is not None:
            self.monitored[path] = monitor
        if state.get("finite") is False:
            self.broken.add(path)
        if not state.get("step"):
            self.ends.add(path)

    def best_of(self, paths: list[Path], like: dict[str, Any] | None = None) -> Path | None:
        """Return the best checkpoint; of equal ones, the oldest.

        Args:
            paths: The checkpoints, newest first.
            like: A monitored value; only values of the same name and mode are compared. `None`
                takes that of the newest checkpoint.
        """
        paths = [path for path in paths if path in self.monitored]
        if not paths:
            return None
        name, mode = ((like or self.monitored[paths[0]])[key] for key in ("name", "mode"))
        valued: list[tuple[Path, float]] = [
            (path, said["value"])
            for path, said in ((path, self.monitored[path]) for path in paths)
            if (said["name"], said["mode"]) == (name, mode) and said["value"] == said["value"]
        ]  # no NaN
        if not valued:
            return None
        return min(reversed(valued), key=lambda each: each[1] if mode == "min" else -each[1])[0]

    def read_best(self, folder: RunFolder, say: Callable[[str], None]) -> Found | None:
        """Return the best undamaged checkpoint, or `None`.

        Args:
            folder: The folder of the run.
            say: Called with a message for each damaged checkpoint.
        """
        paths = folder.checkpoints()
        while (best := self.best_of(paths)) is not None:
            try:
                return folder.read(best)
            except DamagedCheckpoint as error:
                say(f"The best checkpoint is damaged and was skipped: {error}")
                paths.remove(best)
        return None

    def staying(self, paths: list[Path]) -> set[Path]:
        """Return the checkpoints to keep.

        Args:
            paths: The checkpoints, newest first.
        """
        staying = set(paths[: self.keep])
        if staying <= self.broken:  # keep one with a finite loss
            staying |= set([path for path in paths if path not in self.broken][:1])
        if self.keeps_end:
            staying |= set([path for path in paths if path in self.ends][:1])
        best = self.best_of(paths) if self.best else None
        return staying | {best} if best is not None else staying


def _number(name: str) -> int:
    return int(name.split("-")[0])
