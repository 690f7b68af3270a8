"""A `metrics` property of the user's class names the metrics, made in `compile` or not all."""

from functools import partial

import pytest

import lockstep
from tests.conformance.metrics_property import (
    MadeInCompile,
    WithoutCompiledMetrics,
    WithoutLossTracker,
    assert_trains_as_on_one_device,
)


@pytest.mark.each_value_once
@pytest.mark.parametrize("cls", [MadeInCompile, WithoutLossTracker, WithoutCompiledMetrics])
@pytest.mark.parametrize("before_compile", [True, False])
def test_trains_as_on_one_device(cls, before_compile):
    """distribute() before compile() raised the AttributeError of the user's property."""
    distribute = partial(lockstep.distribute, devices=3)
    assert_trains_as_on_one_device(cls, distribute, before_compile=before_compile)


def test_release_before_compile():
    model = lockstep.distribute(MadeInCompile(), 3)
    assert lockstep.release(model) is model


def test_a_property_that_fails_after_compile_is_the_users_error():
    class Broken(WithoutLossTracker):
        @property
        def metrics(self):
            return [self.nothing]

    model = Broken()
    model.compile("sgd")
    with pytest.raises(AttributeError, match="nothing"):
        lockstep.distribute(model, 3)
