"""Which variables of a model are sharded, and along which dim."""

from typing import Any

import keras

from lockstep.core.branch_homes import owners_of_slots
from lockstep.core.devices import sharded_dim
from lockstep.core.state import item_bytes, optimizers_of, rnn_states
from lockstep.keras_compat import layers_in

Kinds = tuple[type, ...]
"""Classes of variables that can be sharded. An instance of a subclass is replicated."""


def dim_by_shape(variable: Any, devices: int, kinds: Kinds) -> int | None:
    """Return the dim along which a variable is sharded; `None` if it is replicated."""
    if type(variable) not in kinds:
        return None
    return sharded_dim(variable.shape, item_bytes(variable.dtype), devices)


def sharded_dims(
    model: Any, devices: int, kinds: Kinds = (keras.Variable,)
) -> dict[int, int | None]:
    """Return the dim along which each weight and optimizer slot is sharded, by its `id`.

    It is `None` for a replicated one. The variables of RNNs are replicated: a collective would run
    in each step of their loop. A slot is sharded like its variable. Other variables, such as those
    of metrics, are replicated.

    Args:
        model: The model.
        devices: The number of devices.
        kinds: The classes of variables that can be sharded.
    """
    weights = [*model.variables, *model.trainable_variables]
    dims = {id(variable): dim_by_shape(variable, devices, kinds) for variable in weights}
    for layer in layers_in(model):
        if isinstance(layer, keras.layers.RNN):
            variables = [*layer.variables, *rnn_states(layer)]
            dims |= dict.fromkeys(map(id, variables))
    for _, optimizer in optimizers_of(model):
        owners = owners_of_slots(optimizer, model.trainable_variables)
        for slot in optimizer.variables:
            owner = owners.get(id(slot))
            by_shape = dim_by_shape(slot, devices, kinds)
            dims[id(slot)] = by_shape if owner is None else dims[id(owner)]
    return dims
