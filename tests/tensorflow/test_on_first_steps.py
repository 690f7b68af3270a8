"""The check of the first step on TensorFlow, where losses and metrics may work by rows too."""

import pytest

from tests.precision import floats
from tests.replicas.first_steps import *  # noqa: F403
from tests.replicas.first_steps import assert_found, contrast, model_of


@pytest.fixture(autouse=True)
def _double():
    with floats("float64"):
        yield


@pytest.mark.parametrize("role", [{"loss": contrast}, {"metrics": [contrast]}])
def test_a_loss_or_metric_that_is_wrongly_proven_is_computed_for_the_whole_batch(role):
    assert_found(lambda: model_of(**role))


def test_without_the_check_a_wrongly_proven_metric_is_not_found(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_found(lambda: model_of(metrics=[contrast]))
