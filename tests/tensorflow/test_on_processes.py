"""Several processes, in which the engine for TensorFlow does not run."""

import pytest

import lockstep
from lockstep.errors import UnsupportedBackend


def test_several_processes_are_refused(monkeypatch):
    """Each would train alone, on all rows."""
    monkeypatch.setenv("LOCKSTEP_PROCESSES", "2")
    monkeypatch.setenv("LOCKSTEP_PROCESS", "1")
    monkeypatch.setenv("LOCKSTEP_COORDINATOR", "127.0.0.1:4000")
    with pytest.raises(UnsupportedBackend, match=r"process 1 of 2 .*, but on 'tensorflow'") as said:
        lockstep.initialize()
    assert "LOCKSTEP_PROCESSES=1" in str(said.value)
    monkeypatch.delenv("LOCKSTEP_PROCESS")
    monkeypatch.setenv("LOCKSTEP_PROCESSES", "1")
    assert lockstep.initialize() == (0, 1)


def test_a_cluster_of_tensorflow_is_refused(monkeypatch):
    """Its two workers were two trainings."""
    cluster = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    monkeypatch.setenv("TF_CONFIG", cluster)
    with pytest.raises(UnsupportedBackend) as said:
        lockstep.initialize()
    assert str(said.value).startswith("This is process 1 of 2 (TensorFlow's cluster: TF_CONFIG)")
