"""What cannot be attached to devices."""

from typing import Any

import keras

from lockstep.engines.jax.steps.step import StepFunction
from lockstep.errors import LayoutConflict, UnsupportedBackend, UnsupportedModel


def check_mode() -> None:
    """Raise where Keras's variables are no plain JAX ones."""
    # keras/src/backend/config.py: in this mode variables are Flax NNX objects.
    from keras.src.backend.config import is_nnx_enabled

    if is_nnx_enabled():
        raise UnsupportedBackend(
            "Keras runs with KERAS_NNX_ENABLED, and the engine serves plain JAX variables.\n"
            "Unset KERAS_NNX_ENABLED before Keras is imported."
        )


def check_no_distribution() -> None:
    """Raise where Keras lays out variables itself."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise LayoutConflict(
            f"A global keras.distribution is set ({type(distribution).__name__}), and would lay "
            "out variables beside lockstep.\n"
            "Call keras.distribution.set_distribution(None) first, and build the model after it."
        )


def check_class(model: Any) -> None:
    """Raise where a class makes its step functions itself."""
    # keras/src/backend/jax/trainer.py: the three methods that make step functions.
    from keras.src.backend.jax.trainer import JAXTrainer

    for name in _MAKING:
        if getattr(type(model), name) is not getattr(JAXTrainer, name):
            raise _own_method(type(model).__name__, name)


def check_instance(model: Any, standing: dict[str, Any]) -> None:
    """Raise where an instance was given step functions, or a method that makes them.

    Args:
        model: The model.
        standing: The methods that lockstep has put on it.
    """
    attributes = vars(model)
    for name in _MAKING:
        if name in attributes and attributes[name] is not standing.get(name):
            raise _own_method(repr(model.name), name)
    for name in ("train_function", "test_function", "predict_function"):
        if is_foreign(attributes.get(name)):
            raise UnsupportedModel(
                f"{model.name!r} was given a {name}, and lockstep has to make its own to run the "
                "step on several devices.\n"
                f"Set model.{name} = None first, or override {name.replace('function', 'step')}."
            )


def is_foreign(function: Any) -> bool:
    """Whether neither Keras nor lockstep has made this step function."""
    # keras/src/backend/jax/trainer.py, JAXTrainer._make_function
    made = isinstance(function, StepFunction) or function is None
    return not made and getattr(function, "__module__", None) != "keras.src.backend.jax.trainer"


def _own_method(owner: str, name: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{owner} has its own {name}, and lockstep has to replace that "
        "method to run the step on several devices.\n"
        "Override train_step, test_step or predict_step instead."
    )


_MAKING = ("make_train_function", "make_test_function", "make_predict_function")


def check_layout(model: Any, variable: Any) -> None:
    """Raise where a variable is laid out already."""
    # keras/src/backend/jax/core.py, JaxVariable._initialize_layout
    layout = variable._layout
    if layout is None and variable.value.sharding.is_fully_replicated:
        return
    raise LayoutConflict(
        f"Variable {variable.path!r} of {model.name!r} is laid out by another tool "
        f"({type(layout or variable.value.sharding).__name__}), and lockstep wants to lay it out.\n"
        "Distribute with one tool: build the model anew without the other one, and load its file."
    )


def no_program(model: Any) -> UnsupportedModel:
    """What to raise where a step cannot be one program, as several processes need it."""
    # keras/src/trainers/trainer.py, model_supports_jit: what jit_compile="auto" goes by
    layers = [layer for layer in model._flatten_layers() if not layer.supports_jit]
    if layers and not model.run_eagerly:
        names = ", ".join(f"{layer.name} ({type(layer).__name__})" for layer in layers)
        return UnsupportedModel(
            f"Keras cannot compile {names}, and JAX runs in several processes, where a step\n"
            "has to be one program. Apply such layers to the data instead, before fit."
        )
    return UnsupportedModel(
        "run_eagerly or jit_compile=False was asked for, and JAX runs in several processes, where "
        "a step\nhas to be one program. Leave both out of compile()."
    )
