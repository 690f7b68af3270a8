"""The check of the first step on TensorFlow."""

import pytest

from tests.precision import floats
from tests.replicas.first_steps import *  # noqa: F403


@pytest.fixture(autouse=True)
def _double():
    with floats("float64"):
        yield
