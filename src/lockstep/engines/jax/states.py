"""States of stateful RNNs, carried from batch to batch."""

import weakref
from functools import partial
from typing import Any

import keras

from lockstep.engines.jax.outside import bring_home


class CarriedState:
    """Makes a step carry one state of a stateful RNN layer.

    A JAX step returns the variables it changed, and Keras 3.15.1 does not count the
    states of an RNN among them, so that they stay zero. A layer's random seeds are
    counted, and are no weights: in neither `get_weights()` nor any file. This stands
    among the seeds of the layer.

    Attributes:
        state: The variable, under the name that Keras asks a seed generator for.
    """

    def __init__(self, state: Any) -> None:
        self.state = state


def stateful_layers(model: Any) -> list[Any]:
    """The RNN layers of a model that keep their state and are built."""
    # keras/src/layers/layer.py, Layer._flatten_layers
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.RNN) and layer.stateful and layer.states is not None
    ]


def states_of(model: Any) -> list[Any]:
    """The state variables of every stateful RNN layer of a model."""
    return [state for layer in stateful_layers(model) for state in keras.tree.flatten(layer.states)]


def carry_states(model: Any) -> list[Any]:
    """Let every step of `model` carry the states of its stateful RNN layers, which are returned."""
    every: list[Any] = []
    for layer in stateful_layers(model):
        # keras/src/layers/layer.py, Layer.variables reads `_seed_generators`. The list
        # is tracked, and would take nothing but seed generators by its own append.
        seeds = layer._seed_generators
        carried = [seed.state for seed in seeds if isinstance(seed, CarriedState)]
        for state in keras.tree.flatten(layer.states):
            if not any(state is other for other in carried):
                list.append(seeds, CarriedState(state))
        # Keras 3.15.1's own, keras/src/layers/rnn/rnn.py, fails where cells are stacked.
        states = keras.tree.flatten(layer.states)
        vars(layer)["reset_state"] = partial(_reset_now, weakref.ref(model), states)
        every += states
    return every


def drop_states(model: Any) -> None:
    """Undo `carry_states`."""
    for layer in stateful_layers(model):
        layer._seed_generators[:] = [
            seed for seed in layer._seed_generators if not isinstance(seed, CarriedState)
        ]
        vars(layer).pop("reset_state", None)


def reset(model: Any, states: list[Any]) -> None:
    """Set states of `model` to zero, between two steps as well."""
    bring_home(model)  # within a fit it would come back over the zeros
    _zero(states)


def _reset_now(model: "weakref.ref[Any]", states: list[Any]) -> None:
    found = model()
    if found is None:
        _zero(states)
    else:
        reset(found, states)


def _zero(states: list[Any]) -> None:
    for state in states:
        state.assign(keras.ops.zeros(state.shape, state.dtype))
