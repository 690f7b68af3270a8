"""Several processes, in which the engine for TensorFlow does not run."""

import pytest

import lockstep
from lockstep.errors import UnsupportedBackend


def test_several_processes_are_refused(monkeypatch):
    """Each would train alone, on all rows."""
    monkeypatch.setenv("LOCKSTEP_PROCESSES", "2")
    monkeypatch.setenv("LOCKSTEP_PROCESS", "1")
    monkeypatch.setenv("LOCKSTEP_COORDINATOR", "127.0.0.1:4000")
    with pytest.raises(UnsupportedBackend, match=r"process 1 of 2 .*, and on 'tensorflow'") as said:
        lockstep.initialize()
    assert "LOCKSTEP_PROCESSES=1" in str(said.value)
    monkeypatch.delenv("LOCKSTEP_PROCESS")
    monkeypatch.setenv("LOCKSTEP_PROCESSES", "1")
    assert lockstep.initialize() == (0, 1)
