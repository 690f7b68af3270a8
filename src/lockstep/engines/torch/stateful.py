"""Stateful RNNs: a step computes with copies of the states, which it then assigns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch

from lockstep.engines.patched import patched
from lockstep.state import stateful_layers


@contextmanager
def copied_states(model: Any) -> Iterator[None]:
    """Let the stateful RNNs of a model compute with copies of their states in the context.

    Keras 3.15.1 computes with the tensor of the state variable, and assigns the new state to it.
    PyTorch then has no old state for the backward pass, and raises.
    """
    # keras/src/layers/rnn/rnn.py, RNN.call; keras/src/layers/rnn/lstm.py, LSTM.inner_loop
    layers = stateful_layers(model)
    with patched([(layer, "inner_loop", _on_copies(layer.inner_loop)) for layer in layers]):
        yield


def _on_copies(inner_loop: Callable[..., Any]) -> Callable[..., Any]:
    def inner_loop_on_copies(*, initial_state: Any, **kwargs: Any) -> Any:
        copies = keras.tree.map_structure(torch.clone, initial_state)
        return inner_loop(initial_state=copies, **kwargs)

    return inner_loop_on_copies
