"""These tests need Keras on TensorFlow: `KERAS_BACKEND=tensorflow python -m pytest`."""

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    collect_ignore_glob = ["test_on_*.py"]


@pytest.fixture
def first_steps_unchecked(request, monkeypatch):
    """Among quick tests, values are compared with one device alone: nothing mends a wrong split.

    The check of the first step runs each of these steps twice more. From `--thorough` on, it does.
    """
    if not any(map(request.config.getoption, ("--thorough", "--whole"))):
        monkeypatch.setenv("LOCKSTEP_CHECK", "0")
