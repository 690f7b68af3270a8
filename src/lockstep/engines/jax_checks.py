"""What cannot be attached to devices."""

from typing import Any

import keras

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

    for name in ("make_train_function", "make_test_function", "make_predict_function"):
        own = getattr(type(model), name)
        if own is not getattr(JAXTrainer, name):
            raise UnsupportedModel(
                f"{type(model).__name__} has its own {name}, and lockstep has to replace that "
                "method to run the step on several devices.\n"
                "Override train_step, test_step or predict_step instead."
            )


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
