"""The examples in the docstrings run, and say what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parents[2]
RESCUE = ("api", "match", "match_by_order", "old_layers", "read", "weight_tree")


@pytest.mark.parametrize("name", ["errors", *(f"rescue.{name}" for name in RESCUE)])
def test_examples(name, tmp_path, monkeypatch):
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f"lockstep.{name}")
    found = doctest.testmod(module, extraglobs={"lockstep": lockstep})
    assert found.attempted
    assert not found.failed
