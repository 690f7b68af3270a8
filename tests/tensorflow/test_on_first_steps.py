"""The check of the first step on TensorFlow, where losses and metrics may work by rows too."""

import numpy as np
import pytest

import lockstep
from lockstep.errors import UnsupportedModel
from tests.precision import floats
from tests.replicas.first_steps import *  # noqa: F403
from tests.replicas.first_steps import DEVICES, assert_found, contrast, data, model_of


@pytest.fixture(autouse=True)
def _double():
    with floats("float64"):
        yield


@pytest.mark.parametrize("role", [{"loss": contrast}, {"metrics": [contrast]}])
def test_a_loss_or_metric_that_is_wrongly_proven_is_computed_for_the_whole_batch(role, monkeypatch):
    assert_found(lambda: model_of(**role))
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_found(lambda: model_of(**role))


def test_a_loss_that_is_declared_wrongly_is_an_error():
    def declared(y_true, y_pred):
        return contrast(y_true, y_pred)

    made = lockstep.distribute(model_of(loss=lockstep.rowwise(declared)), DEVICES)
    before = made.get_weights()
    with pytest.raises(UnsupportedModel, match="is declared row-wise"):
        made.train_on_batch(*data())
    for a, b in zip(made.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
