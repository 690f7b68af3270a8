"""The state that a loop has outside of the variables, brought home."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.jax.trainer import JAXTrainer

# keras/src/backend/jax/trainer.py: `_get_jax_state` takes the state out of the variables,
# `_purge_model_variables` empties them, `_jax_state` is where it stands until
# `jax_state_sync` puts it back, which says so in `_jax_state_synced`.


def every_variable(model: Any) -> list[Any]:
    """Every variable a training step reads or writes, each once."""
    optimizer = getattr(model, "optimizer", None)
    found = [*model.variables, *model.metrics_variables]
    found += optimizer.variables if optimizer is not None else []
    return list({id(variable): variable for variable in found}.values())


def unshare_arrays(variables: list[Any]) -> None:
    """Give each of these variables an array of its own.

    Of two that share one, as the average of an optimizer and its variable may, a step would
    give the array away for both.
    """
    # keras/src/backend/common/variables.py, Variable: `value` asks for scopes, and takes longer.
    arrays = {id(variable._value) for variable in variables}
    if len(arrays) == len(variables):
        return
    values: set[int] = set()
    for variable in variables:
        value = variable.value
        if id(value) in values:
            variable.assign(jnp.copy(value))
        values.add(id(value))


def uncommit(variables: list[Any]) -> None:
    """Put the values of these variables on the default device, where they mix with any other."""
    for variable in variables:
        if variable.value.committed:
            # Through the host: what JAX copies between devices stays committed to them.
            variable.assign(jnp.asarray(np.asarray(variable.value)))


def put_back(model: Any) -> None:
    """What `jax_state_sync` does, without a conversion of each array.

    Keras assigns one after the other, those of optimizers twice, which takes as long as several
    steps. An array that is what the variable holds anyway becomes its value here.
    """
    if in_stateless_scope():  # in which variables keep what they have
        JAXTrainer.jax_state_sync(model)
        return
    attributes = vars(model)
    state = attributes.get("_jax_state")
    if not state or model._jax_state_synced:
        return
    for name in GROUPS:
        if values := state.get(name, None):
            for variable, value in zip(_variables_of(model, name), values, strict=False):
                _set(variable, value)  # as many as there are of both, as in Keras
    attributes["_jax_state_synced"] = True


GROUPS = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)
"""What Keras calls the parts of a state, in the order in which it puts them back."""


def _variables_of(model: Any, group: str) -> list[Any]:
    """The variables of a part of the state."""
    # keras/src/backend/jax/trainer.py, JAXTrainer.jax_state_sync
    found: list[Any] = (
        model.optimizer.variables if group == "optimizer_variables" else getattr(model, group)
    )
    return found


def _set(variable: Any, value: Any) -> None:
    # keras/src/backend/common/variables.py, Variable.assign, and keras/src/backend/jax/core.py,
    # JaxVariable._direct_assign: what is left of them where nothing is to be converted.
    plain = type(variable) is keras.Variable and variable._layout is None
    fits = plain and isinstance(value, jax.Array) and value.shape == variable._shape
    if fits and _name_of(value.dtype) == variable._dtype:
        variable._value = value
    else:
        variable.assign(value)


@functools.cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name  # which NumPy composes anew each time


def bring_home(model: Any) -> None:
    """Put the state of a loop that is under way into the variables of `model`.

    Variables that have values keep them: a call of Keras that was refused leaves the state
    of the call before it, which `jax_state_sync` alone would put over newer weights.
    """
    if not getattr(model, "_jax_state", None) or model._jax_state_synced:
        return
    variables = every_variable(model)
    inside = [(variable, variable.value) for variable in variables if not _is_outside(variable)]
    if len(inside) == len(variables):  # nothing runs
        model._jax_state = None
        return
    model.jax_state_sync()
    for variable, value in inside:
        variable.assign(value)


def _is_outside(variable: Any) -> bool:
    # keras/src/backend/common/variables.py, Variable; what a step has taken is deleted.
    value = variable._value
    return value is None or value.is_deleted()
