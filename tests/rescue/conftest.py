"""The fixture of all tests of old files."""

import pytest

from lockstep.rescue import hdf5


@pytest.fixture(autouse=True)
def _files_are_opened_without_a_probe(request, monkeypatch):
    """The process that walks a file first takes a second; it has tests of its own."""
    if request.module.__name__.rpartition(".")[2] != "test_hostile_files":
        monkeypatch.setattr(hdf5, "require_survival", lambda path: None)
