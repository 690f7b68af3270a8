"""Which modules are the user's own."""

import importlib
import sys

import keras
import numpy as np
import pytest

from lockstep.attach.model_pickle import reason_of
from lockstep.core.own_code import is_own


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Import a new module of this name from a folder, in which packages may be installed."""

    def run(name, installed):
        if installed:
            (tmp_path / "something-1.0.dist-info").mkdir()
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return run


def test_a_script_beside_no_package_is_own(imported):
    assert is_own(imported("my_layers", installed=False))


def test_what_pip_installed_into_a_folder_of_the_users_choice_is_not_own(imported):
    assert not is_own(imported("their_layers", installed=True))


def test_frameworks_are_not_own_in_a_checkout_either(monkeypatch):
    monkeypatch.setattr(keras, "__file__", "/home/me/keras/keras/__init__.py")
    assert not is_own(keras)
    assert not is_own(np)


def test_the_reason_of_an_error_is_its_first_line_of_at_most_160_letters():
    assert reason_of(ValueError("cannot pickle it.\nThis is why")) == "cannot pickle it"
    assert reason_of(ValueError("a" * 159 + "bc")) == "a" * 159 + "b"
    assert reason_of(KeyError()) == "KeyError"
