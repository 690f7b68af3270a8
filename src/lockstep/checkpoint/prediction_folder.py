"""The files of a prediction: complete, or in a folder beside with the position to go on from."""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import keras
import numpy as np

from lockstep.checkpoint.folder_lock import FILE as LOCK
from lockstep.checkpoint.folder_lock import only_writer
from lockstep.core.files import replacing, sync_folder
from lockstep.errors import PredictionFileError

SUFFIX, NPY = ".partial", ".npy"
_POSITION, _ROWS, _REPLACED = "position.json", "rows", "replaced"
"""The names in a folder of an unfinished prediction."""


class PredictionFolder:
    """The files of one prediction.

    Rows and position are in `PATH.partial/`, until the files are complete and replace those at
    the path. At any kill, the path has its old files or the new ones.

    Args:
        path: The file of the rows, with the suffix `.npy`; or a folder with a file for each output.
        notes: The number of the newest positions that are kept.
    """

    def __init__(self, path: Path, notes: int = 1) -> None:
        self.path = path
        self._folder = path.with_name(path.name + SUFFIX)
        self._files: list[_RowFile] | None = None
        self._most = notes
        self._notes: list[dict[str, Any]] = []
        self._written: tuple[list[int], list[int]] = ([], [])  # a position, and rows of each file

    @contextlib.contextmanager
    def opened(self) -> Iterator[dict[str, Any] | None]:
        """Make the folder, and yield what an unfinished call has noted, `None` without one.

        The newest position is in it, and the older ones that are kept: see `positions_in`. Call
        `go_on` with one of them, or `begin_anew`.

        Raises:
            PredictionFileError: If the path or the folder has something else, or another call
                writes there.
        """
        self._check()
        self._folder.mkdir(exist_ok=True)
        try:
            with only_writer(self._folder, self._is_written):
                try:
                    yield self._left()
                finally:
                    for file in self._files or []:
                        file.close()
                    if not (self._folder / _POSITION).exists():  # nothing to go on from
                        self._clear()
        finally:
            with contextlib.suppress(OSError):  # there is something to go on from
                self._folder.rmdir()

    def go_on(self, noted: dict[str, Any], number: int = 0) -> None:
        """Open the files as they were at a position of an unfinished call.

        Args:
            noted: What it has noted.
            number: The number of the position in `positions_in`.

        Raises:
            PredictionFileError: If the files have fewer rows.
        """
        self._notes = positions_in(noted)[number:]
        if number:  # the files lose the rows after it
            self._write_notes(noted)
        position = self._notes[0]
        try:
            self._files = [_RowFile(self._file(each["name"]), **each) for each in position["files"]]
            self._written = position["position"], [each["rows"] for each in position["files"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._unreadable(error) from error

    def begin_anew(self) -> None:
        """Remove the rows of an unfinished call."""
        self._clear()

    def write(self, rows: Any, position: list[int]) -> None:
        """Append the rows of an execution.

        Args:
            rows: NumPy arrays in the structure of the output.
            position: The position after them.

        Raises:
            PredictionFileError: If they do not fit a file, or the rows before them.
        """
        named: dict[str, np.ndarray] = {}
        for place, each in keras.tree.flatten_with_path(rows):
            name = _name(place)
            while name in named:  # "x/y" and "x_y" are two outputs
                name += "_"
            named[name] = _storable(each)
        if self._files is None:
            self._check_outputs(list(named))
            (self._folder / _ROWS).mkdir(exist_ok=True)
            self._files = [
                _RowFile(self._file(name), name, str(each.dtype), each.shape[1:])
                for name, each in named.items()
            ]
        if [file.name for file in self._files] != list(named):
            raise PredictionFileError(
                f"The outputs changed from {[file.name for file in self._files]} to "
                f"{list(named)}, but a file holds one output.\n"
                "Pass a function instead of a path."
            )
        for file in self._files:
            file.check(named[file.name])
        for file in self._files:
            file.append(named[file.name])
        before = self._written[1] or [0] * len(named)
        counts = [count + len(rows) for count, rows in zip(before, named.values(), strict=True)]
        self._written = position, counts  # at once: an interrupt may come at any moment

    def note(self, facts: dict[str, Any]) -> None:
        """Note the position, when the disk has the rows before it.

        Args:
            facts: What an unfinished call and the next one must share.
        """
        if self._files is None or not self._written[1]:
            return
        files = [file.synced(rows) for rows, file in self._counted()]
        now = {"position": self._written[0], "files": files}
        self._notes = [now, *(each for each in self._notes if each["position"] != now["position"])]
        del self._notes[self._most :]
        self._write_notes(facts)

    def _write_notes(self, facts: dict[str, Any]) -> None:
        noted = {**facts, **self._notes[0], "earlier": self._notes[1:]}
        with replacing(self._folder / _POSITION) as temporary:
            temporary.write_text(json.dumps(noted))

    def finish(self) -> None:
        """Replace the files at the path by those of this call."""
        for count, file in self._counted():
            file.synced(count)
            file.close()
        rows = self._folder / _ROWS
        if self.path.suffix == NPY:
            os.replace(rows / self.path.name, self.path)
        else:
            sync_folder(rows)
            if self.path.exists():  # a folder of such files: it has been checked
                os.rename(self.path, self._folder / _REPLACED)
            os.rename(rows, self.path)
        sync_folder(self.path.parent)
        (self._folder / _POSITION).unlink(missing_ok=True)

    def _counted(self) -> list[tuple[int, "_RowFile"]]:
        return list(zip(self._written[1], self._files or [], strict=True))

    def _check(self) -> None:
        is_file = self.path.suffix == NPY
        if not self.path.parent.is_dir():
            raise self._refused(f"there is no folder {self.path.parent}.\nCreate it first")
        if is_file and self.path.is_dir():
            raise self._refused("it is a folder.\nName a file, or remove the folder")
        if not is_file and self.path.exists():
            others = [name for name in _names_in(self.path) if not name.endswith(NPY)]
            if not self.path.is_dir() or others:
                found = f"it has {others[0]!r}" if others else "it is a file"
                raise self._refused(f"{found}.\nName a folder that is new or has .npy files only")
        known = (_POSITION, _ROWS, _REPLACED, LOCK)
        others = [
            name
            for name in (_names_in(self._folder) if self._folder.exists() else [])
            if name not in known and not name.endswith(f"-{_POSITION}")
        ]
        if others:
            raise self._refused(
                f"{self._folder} is not a folder of unfinished predictions: it contains "
                f"{others[0]!r}.\nMove it, or choose a different path"
            )

    def _check_outputs(self, names: list[str]) -> None:
        if self.path.suffix == NPY and len(names) > 1:
            raise self._refused(
                f"the model has {len(names)} outputs: {', '.join(names)}.\nName a folder, such "
                f"as {self.path.stem!r}: each output is written to a file in it"
            )
        if self.path.suffix != NPY and len(names) == 1:
            raise self._refused(
                f"the model has one output.\nName a file, such as {self.path.name + NPY!r}"
            )

    def _refused(self, why: str) -> PredictionFileError:
        return PredictionFileError(f"Predictions cannot be written to {str(self.path)!r}: {why}.")

    def _is_written(self, writer: str) -> PredictionFileError:
        return self._refused(f"it is in use by {writer}.\nWait for it, or choose a different path")

    def _file(self, name: str) -> Path:
        one = self.path.suffix == NPY
        return self._folder / _ROWS / (self.path.name if one else f"{name}{NPY}")

    def _left(self) -> dict[str, Any] | None:
        """Return what an unfinished call has noted."""
        place = self._folder / _POSITION
        if not place.exists():
            self._clear()
            return None
        try:
            noted: dict[str, Any] = json.loads(place.read_text())
            if not {"model", "weights", "position", "files"} <= noted.keys():
                raise ValueError("a part of it is missing")
            paths = [self._file(each["name"]) for each in noted["files"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._unreadable(error) from error
        if not all(path.exists() for path in paths):  # they are at the path: only this is left
            self._clear()
            return None
        return noted

    def _unreadable(self, error: Exception) -> PredictionFileError:
        return self._refused(
            f"{self._folder / _POSITION} cannot be read ({error}).\n"
            f"Remove {self._folder.name} to start again"
        )

    def _clear(self) -> None:
        replaced = self._folder / _REPLACED
        if replaced.exists() and not self.path.exists():  # a kill came before the new folder
            os.rename(replaced, self.path)
        for name in _names_in(self._folder):
            if name.endswith(_POSITION):  # one that a kill has left unfinished too
                (self._folder / name).unlink()
        for name in (_ROWS, _REPLACED):
            shutil.rmtree(self._folder / name, ignore_errors=True)


def path_of_process(path: Path, rank: int, size: int) -> Path:
    """Return the path of the rows of a process.

    Example:
        >>> path_of_process(Path("scores.npy"), 0, 4).name
        'scores-00000-of-00004.npy'
    """
    return path.with_name(f"{path.stem}-{rank:05d}-of-{size:05d}{path.suffix}")


def unfinished_of_others(path: Path, size: int) -> list[Path]:
    """Return the folders of unfinished calls of another number of processes.

    Args:
        path: The path without the number of a process.
        size: The number of processes here.
    """
    names = re.compile(
        rf"{re.escape(path.stem)}-\d{{5}}-of-(\d{{5}}){re.escape(path.suffix + SUFFIX)}"
    )
    found = [(name, names.fullmatch(name)) for name in _names_in(path.parent)]
    others = [name for name, match in found if match and int(match[1]) != size]
    return [path.parent / name for name in others if (path.parent / name / _POSITION).exists()]


def positions_in(noted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the positions of an unfinished call, the newest one first."""
    newest = {name: noted[name] for name in ("position", "files")}
    return [newest, *noted.get("earlier", [])]


class _RowFile:
    """A `.npy` file that grows by rows.

    Args:
        path: The file.
        name: The name of the output.
        dtype: The dtype.
        shape: The shape of a row.
        rows: The number of rows that it has; later ones are removed.
    """

    def __init__(self, path: Path, name: str, dtype: str, shape: Any, rows: int = 0) -> None:
        self.name = name
        self._dtype, self._shape = np.dtype(dtype), tuple(shape)
        self._file: IO[bytes] = open(path, "r+b" if rows else "w+b")  # noqa: SIM115
        self._write_header(rows)
        size = self._file.tell() + rows * math.prod(self._shape) * self._dtype.itemsize
        if rows and os.fstat(self._file.fileno()).st_size < size:
            raise ValueError(f"{path} is shorter than {rows} rows")
        self._file.truncate(size)
        self._file.seek(size)

    def check(self, rows: np.ndarray) -> None:
        """Raise if rows are not like those of the file."""
        if rows.dtype != self._dtype or rows.shape[1:] != self._shape:
            raise PredictionFileError(
                f"Output {self.name!r} has rows of shape {rows.shape[1:]} and type "
                f"{rows.dtype}, but earlier rows have\n{self._shape} and {self._dtype}: all "
                "rows of a .npy file need the same. Pad the data to one length, or pass\na "
                "function instead of a path."
            )

    def append(self, rows: np.ndarray) -> None:
        """Append rows."""
        self._file.write(np.ascontiguousarray(rows).reshape(-1).view("uint8").data)

    def synced(self, rows: int) -> dict[str, Any]:
        """Return the arguments of this class for the file, when the disk has so many rows of it."""
        self._file.seek(0)
        self._write_header(rows)
        self._file.seek(0, os.SEEK_END)
        self._file.flush()
        os.fsync(self._file.fileno())
        dtype, shape = str(self._dtype), list(self._shape)
        return {"name": self.name, "dtype": dtype, "shape": shape, "rows": rows}

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # a full disk, of which the caller knows
            self._file.close()

    def _write_header(self, rows: int) -> None:
        # NumPy pads a header so that its first dim may grow: numpy/lib/_format_impl.py.
        header = {"shape": (rows, *self._shape), "fortran_order": False}
        header["descr"] = np.lib.format.dtype_to_descr(self._dtype)
        np.lib.format.write_array_header_1_0(self._file, header)


def _storable(rows: np.ndarray) -> np.ndarray:
    """Return rows of a type that a `.npy` file has, with the same values.

    Raises:
        PredictionFileError: If there is none.
    """
    if not rows.ndim:
        raise PredictionFileError(
            f"An output has one value for the whole batch ({rows}), but a file needs one row "
            "for each row of the data.\n"
            "Return one value per row from the model, or pass a function instead of a path."
        )
    if rows.dtype.kind == "V":  # bfloat16 and other short types, which float32 holds exactly
        return rows.astype("float32")
    if rows.dtype.kind not in "biufc":
        raise PredictionFileError(
            f"An output has the type {rows.dtype}, but a portable .npy file can hold only "
            "numbers.\nPass a function instead of a path: it is called with the rows in order."
        )
    return rows


def _name(place: tuple[Any, ...]) -> str:
    name = ".".join(str(part) for part in place) or "0"
    return "".join(one if one.isalnum() or one in "._-" else "_" for one in name)


def _names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []
