"""The examples in the docstrings run, and say what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name", ["front", "keras2", "leaves", "match", "plan", "settings", "states", "theano"]
)
def test_examples(name, tmp_path, monkeypatch):
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f"lockstep.rescue.{name}")
    found = doctest.testmod(module, extraglobs={"lockstep": lockstep})
    assert found.attempted
    assert not found.failed
