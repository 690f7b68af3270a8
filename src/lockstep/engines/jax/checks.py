"""Checks for models that cannot be attached to devices."""

from typing import Any

import keras

from lockstep.engines.jax.steps.step import StepFunction
from lockstep.errors import LayoutConflict, UnsupportedBackend, UnsupportedModel
from lockstep.keras_compat import is_nnx_enabled, layers_in, layout_of, trainer_module
from lockstep.training.overrides import MAKERS, own_maker


def check_mode() -> None:
    """Raise if Keras's variables are not plain JAX variables."""
    # keras/src/backend/config.py: in this mode variables are Flax NNX objects.
    if is_nnx_enabled():
        raise UnsupportedBackend(
            "Keras runs with KERAS_NNX_ENABLED, and the engine serves plain JAX variables.\n"
            "Unset KERAS_NNX_ENABLED before Keras is imported."
        )


def check_no_distribution() -> None:
    """Raise if Keras lays out variables itself."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise LayoutConflict(
            f"A global keras.distribution is set ({type(distribution).__name__}), and would lay "
            "out variables beside lockstep.\n"
            "Call keras.distribution.set_distribution(None) first, and build the model after it."
        )


def check_instance(model: Any, standing: dict[str, Any]) -> None:
    """Raise if an instance has its own step functions, or its own methods that make them.

    Args:
        model: The model.
        standing: The methods that lockstep has put on the instance.
    """
    attributes = vars(model)
    for name in MAKERS:
        if name in attributes and attributes[name] is not standing.get(name):
            raise own_maker(repr(model.name), name)
    for name in ("train_function", "test_function", "predict_function"):
        if is_foreign(attributes.get(name)):
            raise UnsupportedModel(
                f"{model.name!r} was given a {name}, and lockstep has to make its own to run the "
                "step on several devices.\n"
                f"Set model.{name} = None first, or override {name.replace('function', 'step')}."
            )


def is_foreign(function: Any) -> bool:
    """Return whether neither Keras nor lockstep made this step function."""
    # keras/src/backend/jax/trainer.py, JAXTrainer._make_function
    made = isinstance(function, StepFunction) or function is None
    return not made and getattr(function, "__module__", None) != trainer_module()


def check_layout(model: Any, variable: Any) -> None:
    """Raise if a variable already has a layout."""
    # keras/src/backend/jax/core.py, JaxVariable._initialize_layout
    layout = layout_of(variable)
    if layout is None and variable.value.sharding.is_fully_replicated:
        return
    raise LayoutConflict(
        f"Variable {variable.path!r} of {model.name!r} is laid out by another tool "
        f"({type(layout or variable.value.sharding).__name__}), and lockstep wants to lay it out.\n"
        "Distribute with one tool: build the model anew without the other one, and load its file."
    )


def no_program(model: Any) -> UnsupportedModel:
    """Return the error for a step that cannot be one program, as several processes need."""
    # keras/src/trainers/trainer.py, model_supports_jit: jit_compile="auto" uses it.
    layers = [layer for layer in layers_in(model) if not layer.supports_jit]
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
