"""Stateful RNNs: a step computes with copies of the states, which it then assigns.

Where several replicas run one, each runs its own rows of the states.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch

from lockstep.engines.patched import patched
from lockstep.engines.torch.replica import Replica
from lockstep.keras_compat import EXPECTED_BATCH_SIZE
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


def by_rows(rnn: Any, replica: Replica) -> list[tuple[Any, str, Any]]:
    """Return the attributes to patch so that this replica runs its rows of an RNN's states.

    Row i of a batch continues row i of the batch before. The new rows of all replicas are
    gathered, so the states of every process are complete.

    Returns:
        Tuples of the RNN, the name of an attribute, and its new value.
    """
    # keras/src/layers/rnn/rnn.py, RNN.call
    call, states = rnn.call, rnn.states

    def call_by_rows(sequences: Any, initial_state: Any = None, **kwargs: Any) -> Any:
        if initial_state is None:
            _check_rows(states, replica)
            initial_state = keras.tree.map_structure(
                lambda state: replica.take(state.value).clone(), states
            )
        return call(sequences, initial_state=initial_state, **kwargs)

    name = f"The state of {rnn.name!r}"
    assigned = keras.tree.map_structure(lambda state: _Gathered(state, replica, name), states)
    return [
        (rnn, "call", call_by_rows),
        (rnn, "states", assigned),
        (rnn, EXPECTED_BATCH_SIZE, None),
    ]


class _Gathered:
    """A state variable to which a replica assigns its rows."""

    def __init__(self, state: Any, replica: Replica, name: str) -> None:
        self._state = state
        self._replica = replica
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def assign(self, own: Any) -> None:
        """Assign the gathered rows of all replicas."""
        self._state.assign(self._replica.gather(own.detach(), self._name))


def _check_rows(states: Any, replica: Replica) -> None:
    expected = {len(state.value) for state in keras.tree.flatten(states)}
    if expected != {replica.rows}:
        raise ValueError(
            "If an RNN is stateful, the batch size of the input sequences must be the same as the "
            f"batch size\nof its state, {expected.pop()}. A batch has {replica.rows} rows."
        )


def _on_copies(inner_loop: Callable[..., Any]) -> Callable[..., Any]:
    def inner_loop_on_copies(*, initial_state: Any, **kwargs: Any) -> Any:
        copies = keras.tree.map_structure(torch.clone, initial_state)
        return inner_loop(initial_state=copies, **kwargs)

    return inner_loop_on_copies
