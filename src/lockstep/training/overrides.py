"""Which methods of a model are Keras's own."""

import inspect
from collections.abc import Callable
from typing import Any

from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import trainer_class

MAKERS = ("make_train_function", "make_test_function", "make_predict_function")
"""The methods that make step functions: keras/src/backend/*/trainer.py."""


def check_makers(model: Any) -> None:
    """Raise if the class of a model overrides the methods that make step functions."""
    for name in MAKERS:
        if getattr(type(model), name) is not getattr(trainer_class(), name):
            raise own_maker(type(model).__name__, name)


def own_maker(owner: str, name: str) -> UnsupportedModel:
    """Return the error for a class or model with such a method of its own."""
    return UnsupportedModel(
        f"{owner} has its own {name}, but lockstep must replace that method to run the step on "
        "several devices.\nOverride train_step, test_step or predict_step instead."
    )


def is_keras(model: Any, name: str) -> bool:
    """Return whether the model's method `name` is Keras's own."""
    found = getattr(getattr(model, name), "__func__", None)
    return found is not None and found is getattr(trainer_class(), name)


def knows_arguments(method: Callable[..., Any], name: str) -> bool:
    """Return whether a method has the arguments of Keras's method `name`."""
    return _arguments(method) == _arguments(getattr(trainer_class(), name))


def _arguments(method: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(method).parameters)
