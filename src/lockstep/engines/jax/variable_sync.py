"""Writes the state of a loop back into the variables of the model."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep.keras_compat import in_stateless_scope, state_sync_name, trainer_class
from lockstep.state import variables_of

# keras/src/backend/jax/trainer.py: `_get_jax_state` takes the state out of the variables, and
# `_purge_model_variables` empties them. `_jax_state` holds the state until `jax_state_sync` puts it
# back and sets `_jax_state_synced`.


def unshare_arrays(variables: list[Any]) -> None:
    """Give each of these variables an array of its own.

    Two variables may share an array, for example an optimizer's average and its variable. A step
    would donate that array for both.
    """
    # keras/src/backend/common/variables.py, Variable: `value` checks scopes and is slower.
    arrays = {id(variable._value) for variable in variables}
    if len(arrays) == len(variables):
        return
    values: set[int] = set()
    for variable in variables:
        value = variable.value
        if id(value) in values:
            variable.assign(jnp.copy(value))
        values.add(id(value))


def to_default_device(variables: list[Any]) -> None:
    """Move the values to the default device, where they mix with any other array."""
    for variable in variables:
        if variable.value.committed:
            # Through the host: an array that JAX copies between devices stays committed.
            variable.assign(jnp.asarray(np.asarray(variable.value)))


def write_state(model: Any) -> None:
    """Write the state into the variables like `jax_state_sync`, without converting each array.

    Keras assigns one variable after the other, and those of optimizers twice, which takes as long
    as several steps. Here an array that the variable would store unchanged becomes its value
    directly.
    """
    if in_stateless_scope():  # variables keep their values in it
        getattr(trainer_class(), state_sync_name())(model)
        return
    attributes = vars(model)
    state = attributes.get("_jax_state")
    if not state or model._jax_state_synced:
        return
    for name in GROUPS:
        if values := state.get(name, None):
            for variable, value in zip(group_of(model, name), values, strict=False):
                _set(variable, value)  # stops at the shorter list, as in Keras
    attributes["_jax_state_synced"] = True


GROUPS = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)
"""Keras's names of the parts of a state, in the order in which Keras writes them back."""


def group_of(model: Any, group: str) -> list[Any]:
    """Return the variables of one of `GROUPS`."""
    # keras/src/backend/jax/trainer.py, JAXTrainer.jax_state_sync
    found: list[Any] = (
        model.optimizer.variables if group == "optimizer_variables" else getattr(model, group)
    )
    return found


def _set(variable: Any, value: Any) -> None:
    # keras/src/backend/common/variables.py, Variable.assign, and keras/src/backend/jax/core.py,
    # JaxVariable._direct_assign: the part that remains without a conversion.
    plain = type(variable) is keras.Variable and variable._layout is None
    fits = plain and isinstance(value, jax.Array) and value.shape == variable._shape
    if fits and _name_of(value.dtype) == variable._dtype:
        variable._value = value
    else:
        variable.assign(value)


@functools.cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name  # NumPy builds the name at every access


def sync_to_variables(model: Any) -> None:
    """Write the state of a running loop into the variables of `model`.

    Variables that have values keep them. A refused Keras call leaves the state of an earlier call,
    and `jax_state_sync` alone would write it over newer weights.
    """
    if not getattr(model, "_jax_state", None) or model._jax_state_synced:
        return
    variables = variables_of(model)
    inside = [(variable, variable.value) for variable in variables if not _is_outside(variable)]
    if len(inside) == len(variables):  # nothing runs
        model._jax_state = None
        return
    model.jax_state_sync()
    for variable, value in inside:
        variable.assign(value)


def _is_outside(variable: Any) -> bool:
    # keras/src/backend/common/variables.py, Variable. A donated array is deleted.
    value = variable._value
    return value is None or value.is_deleted()
