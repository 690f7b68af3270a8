"""Which callbacks are code of the user that may change a model between two steps."""

import importlib
import sys

import keras
import pytest

from lockstep.training.callbacks import may_write_between_steps

LOGGER = """
import keras

class Logger(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass
"""


@pytest.fixture
def logger(tmp_path, monkeypatch):
    """Return the class of a logger of a module of this name, in a folder."""

    def made(name, installed):
        folder = tmp_path / ("site-packages" if installed else "here")
        folder.mkdir()
        (folder / f"{name}.py").write_text(LOGGER)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name).Logger

    return made


def runs_code_of_the_user(*callbacks):
    return may_write_between_steps(keras.callbacks.CallbackList(list(callbacks)), "train")


def test_a_logger_of_the_list_only_writes(logger):
    kind = logger("swanlab", installed=True)
    assert not runs_code_of_the_user(kind())
    assert not runs_code_of_the_user(kind(), keras.callbacks.TerminateOnNaN())


def test_a_subclass_of_a_logger_is_code_of_the_user(logger):
    class Mine(logger("swanlab", installed=True)):
        """May do anything in the method that it inherits, by what that calls."""

    assert runs_code_of_the_user(Mine())


def test_a_function_set_on_a_logger_is_code_of_the_user(logger):
    instance = logger("swanlab", installed=True)()
    instance.on_train_batch_end = lambda batch, logs=None: None
    assert runs_code_of_the_user(instance)


def test_a_module_of_the_user_with_the_name_of_a_logger_is_code_of_the_user(logger):
    assert runs_code_of_the_user(logger("aim", installed=False)())


def test_a_logger_that_is_in_no_list_is_code_of_the_user(logger):
    assert runs_code_of_the_user(logger("another_logger", installed=True)())


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_batch_end"])
def test_a_function_set_on_a_class_of_keras_is_code_of_the_user(hook, monkeypatch):
    monkeypatch.setattr(
        keras.callbacks.TerminateOnNaN, hook, lambda self, batch, logs=None: None, raising=False
    )
    assert runs_code_of_the_user(keras.callbacks.TerminateOnNaN())
