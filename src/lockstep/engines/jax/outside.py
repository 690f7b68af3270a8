"""The state that a loop has outside of the variables, brought home."""

from typing import Any

import jax.numpy as jnp
import numpy as np

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
