"""Chooses the variables of a model that are split into one shard per rank."""

from typing import Any

import keras
import torch

from lockstep.core.branch_homes import owners_of_slots
from lockstep.core.devices import is_large
from lockstep.core.state import item_bytes, optimizers_of, rnn_states, unique
from lockstep.engines.torch.sharded.sharded_variables import ShardedVariable, is_sharded
from lockstep.keras_compat import layers_in, own_trainable_variables, stored_value


def to_shard(model: Any, devices: int) -> list[Any]:
    """Return the variables of a built model that are sharded, or that are to be: weights and slots.

    Whole are small ones, those of RNNs, those that a step may assign to, and parameters of modules
    of PyTorch. A slot is sharded if it has the shape of a sharded weight.
    """
    layers = layers_in(model)
    wholes = [layer for layer in layers if isinstance(layer, _WHOLE)]
    fixed = {id(v) for layer in wholes for v in [*layer.variables, *rnn_states(layer)]}
    others = {
        id(parameter)
        for module in [each for layer in layers for each in layer.modules()]
        if not isinstance(module, (keras.layers.Layer, torch.nn.ParameterDict))
        for parameter in module.parameters(recurse=False)
    }
    weights = [
        variable
        for variable in unique([v for layer in layers for v in own_trainable_variables(layer)])
        if type(variable) in _KINDS
        and is_large(_whole_shape(variable), item_bytes(variable.dtype), devices)
        and id(variable) not in fixed
        and id(stored_value(variable)) not in others
    ]
    known = set(map(id, weights))
    slots = []
    for _, optimizer in optimizers_of(model):
        owners = owners_of_slots(optimizer, model.trainable_variables)
        slots += [
            slot
            for slot in optimizer.variables
            if type(slot) in _KINDS and id(owners.get(id(slot))) in known
        ]
    return [*weights, *slots]


_KINDS = (keras.Variable, ShardedVariable)
_WHOLE = (keras.layers.RNN, keras.layers.SpectralNormalization)
"""Layers that read a weight in each step of a loop, or assign to one."""


def _whole_shape(variable: Any) -> Any:
    return variable.whole_shape if is_sharded(variable) else variable.shape
