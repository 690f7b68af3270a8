"""States of stateful RNNs, carried from batch to batch."""

import weakref
from functools import partial
from typing import Any

import keras

from lockstep.core.state import stateful_layers
from lockstep.engines.jax.steps.variable_sync import sync_to_variables
from lockstep.keras_compat import seed_generators


class CarriedState:
    """Make a step carry one state of a stateful RNN layer.

    A JAX step returns the variables that it changes. Keras 3.15.1 does not include the states of an
    RNN, so they would stay zero. A layer's random seeds are included, and are in neither
    `get_weights()` nor any file. This object is therefore placed among the seeds of the layer.

    Attributes:
        state: The variable, under the name that Keras reads from a seed generator.
    """

    def __init__(self, state: Any) -> None:
        self.state = state


def carry_states(model: Any) -> list[Any]:
    """Make every step of `model` carry its RNN states, and return these states."""
    every: list[Any] = []
    for layer in stateful_layers(model):
        # The tracked list's own append accepts only seed generators.
        seeds = seed_generators(layer)
        carried = [seed.state for seed in seeds if isinstance(seed, CarriedState)]
        for state in keras.tree.flatten(layer.states):
            if not any(state is other for other in carried):
                list.append(seeds, CarriedState(state))
        # Keras 3.15.1's own method, keras/src/layers/rnn/rnn.py, fails for stacked cells.
        states = keras.tree.flatten(layer.states)
        vars(layer)["reset_state"] = partial(_reset_now, weakref.ref(model), states)
        every += states
    return every


def drop_states(model: Any) -> None:
    """Undo `carry_states`."""
    for layer in stateful_layers(model):
        seed_generators(layer)[:] = [
            seed for seed in seed_generators(layer) if not isinstance(seed, CarriedState)
        ]
        vars(layer).pop("reset_state", None)


def reset(model: Any, states: list[Any]) -> None:
    """Set states of `model` to zero. This also works between two steps."""
    sync_to_variables(model)  # a running fit would restore the old states
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
