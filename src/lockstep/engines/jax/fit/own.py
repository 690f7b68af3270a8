"""Which methods of a model are Keras's own."""

import inspect
from collections.abc import Callable
from typing import Any

from keras.src.backend.jax.trainer import JAXTrainer


def is_keras(model: Any, name: str) -> bool:
    """Whether the method of that name is the one that Keras gives to every model."""
    found = getattr(getattr(model, name), "__func__", None)
    return found is not None and found is getattr(JAXTrainer, name)


def knows_arguments(method: Callable[..., Any], name: str) -> bool:
    """Whether a method has the arguments that Keras's method of that name has."""
    return _arguments(method) == _arguments(getattr(JAXTrainer, name))


def is_chained(model: Any) -> bool:
    """Whether each step of an evaluation takes what the one before it has returned."""
    # keras/src/backend/jax/trainer.py, JAXTrainer.test_step, adds each loss to this metric.
    variables = {id(variable) for variable in model.metrics_variables}
    tracked = all(id(variable) in variables for variable in model._loss_tracker.variables)
    return tracked and is_keras(model, "test_step")


def _arguments(method: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(method).parameters)
