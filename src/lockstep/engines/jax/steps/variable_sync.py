"""Writes the state of a loop back into the variables of the model."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.core.state import variables_of
from lockstep.engines.jax.processes import jax_group
from lockstep.keras_compat import (
    JAX_STATE,
    JAX_STATE_SYNCED,
    in_stateless_scope,
    state_sync_name,
    store_value,
    stored_value,
    stores_as_it_is,
    trainer_class,
)


def unshare_arrays(variables: list[Any]) -> None:
    """Give each of these variables an array of its own.

    Two variables may share an array, for example an optimizer's average and its variable. A step
    would donate that array for both.
    """
    arrays = {id(stored_value(variable)) for variable in variables}
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
            variable.assign(jnp.asarray(np.asarray(jax_group.whole(variable.value))))


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
    state = attributes.get(JAX_STATE)
    if not state or getattr(model, JAX_STATE_SYNCED):
        return
    for name in GROUPS:
        if values := state.get(name, None):
            for variable, value in zip(group_of(model, name), values, strict=False):
                _set(variable, value)  # stops at the shorter list, as in Keras
    attributes[JAX_STATE_SYNCED] = True


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
    is_array = isinstance(value, jax.Array)
    if is_array and stores_as_it_is(variable, value.shape, _name_of(value.dtype)):
        store_value(variable, value)
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
    if not getattr(model, JAX_STATE, None) or getattr(model, JAX_STATE_SYNCED):
        return
    variables = variables_of(model)
    inside = [(variable, variable.value) for variable in variables if not _is_outside(variable)]
    if len(inside) == len(variables):  # nothing runs
        vars(model)[JAX_STATE] = None
        return
    model.jax_state_sync()
    for variable, value in inside:
        variable.assign(value)


def _is_outside(variable: Any) -> bool:
    # keras/src/backend/common/variables.py, Variable. A donated array is deleted.
    value = stored_value(variable)
    return value is None or value.is_deleted()
