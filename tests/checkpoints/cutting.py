"""Cuts at calls of the operating system that change files."""

import contextlib
import os

import pytest

CHANGING = ["mkdir", "open", "write", "fsync"]
CHANGING += ["rename", "replace", "unlink", "rmdir"]


class Cut(BaseException):
    """The moment of a kill."""


class Cutting:
    """Cuts at the n-th call that changes something; the disk stays as it is then."""

    def __init__(self, monkeypatch, at, error=None):
        self.calls, self.at, self.error = [], at, error
        for name in CHANGING:
            monkeypatch.setattr(os, name, self._cutting(name, getattr(os, name)))

    def _cutting(self, name, call):
        def cutting(*args, **kwargs):
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return call(*args, **kwargs)
            self.calls.append(name)
            if len(self.calls) - 1 == self.at or (self.error and len(self.calls) > self.at):
                if name == "write":  # half of it had gone out
                    call(args[0], args[1][: len(args[1]) // 2])
                raise self.error or Cut(name)
            return call(*args, **kwargs)

        return cutting


@contextlib.contextmanager
def cut_at(at, error=None):
    """Cut what is done meanwhile at its n-th change; with an error, as a disk that refuses."""
    expected = Cut if error is None else type(error)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(expected):
        yield Cutting(patch, at, error)
