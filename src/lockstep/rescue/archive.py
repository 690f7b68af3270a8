"""`.keras` archives whose weights are written in place, and read in place.

A `.keras` file is a zip of a config, metadata and one HDF5 file, uncompressed. The
HDF5 file is written straight into its place in the zip, so that no second copy of
the weights is ever made, in memory or on disk.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

WEIGHTS = "model.weights.h5"
_PIECE = 2**20


class Window(io.RawIOBase):
    """A part of an open file, as a file of its own."""

    def __init__(self, file: Any, start: int, size: int | None = None) -> None:
        super().__init__()
        self._file, self._start, self._at = file, start, 0
        self._size = size

    def readable(self) -> bool:
        """Yes."""
        return True

    def writable(self) -> bool:
        """Where the size is open."""
        return self._size is None

    def seekable(self) -> bool:
        """Yes."""
        return True

    def _end(self) -> int:
        if self._size is not None:
            return self._size
        return max(int(self._file.seek(0, io.SEEK_END)) - self._start, 0)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move, within the window."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence)
        self._at = offset + (self._end() if base is None else base)
        return self._at

    def tell(self) -> int:
        """Where it is, within the window."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read, never past the window."""
        view = memoryview(buffer).cast("B")
        count = max(min(len(view), self._end() - self._at), 0)
        self._file.seek(self._start + self._at)
        done = int(self._file.readinto(view[:count]))
        self._at += done
        return done

    def write(self, data: Any) -> int:
        """Write at the present place."""
        self._file.seek(self._start + self._at)
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += int(self._file.write(view[done:]) or 0)
        self._at += done
        return done

    def flush(self) -> None:
        """Nothing waits: the file below is not buffered."""

    def truncate(self, size: int | None = None) -> int:
        """Cut the window's end, and the file's with it."""
        end = self._at if size is None else size
        self._file.truncate(self._start + end)
        return end


@contextlib.contextmanager
def writing(path: str, texts: dict[str, str]) -> Iterator[Any]:
    """Write an archive of some texts and one HDF5 file; yields the open HDF5 file."""
    import h5py

    with open(path, "w+b", buffering=0) as file, zipfile.ZipFile(file, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
        info = zipfile.ZipInfo(WEIGHTS, (1980, 1, 1, 0, 0, 0))
        info.CRC = info.file_size = info.compress_size = 0
        info.header_offset = file.seek(0, io.SEEK_END)
        header = len(info.FileHeader(zip64=True))
        start = info.header_offset + header
        file.write(b"\0" * header)
        window = Window(file, start)
        with h5py.File(window, "w") as handle:
            yield handle
        end = file.seek(0, io.SEEK_END)
        info.CRC = _checksum(file, start)
        info.file_size = info.compress_size = end - start
        file.seek(info.header_offset)
        file.write(info.FileHeader(zip64=True))
        file.seek(end)
        archive.filelist.append(info)
        archive.NameToInfo[WEIGHTS] = info
        archive.start_dir = end


@contextlib.contextmanager
def reading(path: str) -> Iterator[Any]:
    """The HDF5 file inside an archive, opened where it lies."""
    import h5py

    with open(path, "rb", buffering=0) as file:
        with zipfile.ZipFile(file) as archive:
            info = archive.getinfo(WEIGHTS)
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{WEIGHTS} is compressed inside the archive")
            file.seek(info.header_offset + 26)
            name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
            start = info.header_offset + 30 + name + extra
        with h5py.File(Window(file, start, info.file_size), "r") as handle:
            yield handle


def _checksum(file: Any, start: int) -> int:
    file.seek(start)
    found = 0
    piece = bytearray(_PIECE)
    while count := file.readinto(piece):
        found = zlib.crc32(memoryview(piece)[:count], found)
    return found
