"""A pytest plugin: every model that is compiled is distributed at once."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("LOCKSTEP_REHEARSE", "4")

import functools
import sys
import types

import keras
import pytest

import lockstep
from lockstep.keras_compat import base_trainer_class
from tests.keras_own.exceptions import CANNOT_APPLY

_TRAINER = base_trainer_class()
_compile = _TRAINER.compile


@functools.wraps(_compile)
def _compile_and_distribute(self, *args, **kwargs):
    result = _compile(self, *args, **kwargs)
    if keras.distribution.distribution() is None:
        lockstep.distribute(self, devices=int(os.environ["LOCKSTEP_REHEARSE"]))
    return result


@pytest.fixture(autouse=True)
def _every_model_distributed(monkeypatch):
    monkeypatch.setattr(_TRAINER, "compile", _compile_and_distribute)


def pytest_collection_modifyitems(config, items):
    cannot = [item for item in items if item.name in CANNOT_APPLY]
    items[:] = [item for item in items if item.name not in CANNOT_APPLY]
    config.hook.pytest_deselected(items=cannot)


def pytest_configure(config):
    # Keras's tests are marked for a conftest.py that its package does not carry.
    for marker in ("requires_trainable_backend", "multi_device", "uses_gpu"):
        config.addinivalue_line("markers", marker)
    stand_in = types.ModuleType("conftest")
    stand_in.skip_if_backend = lambda backend, reason: pytest.mark.skipif(
        keras.backend.backend() == backend, reason=reason
    )
    sys.modules.setdefault("conftest", stand_in)
