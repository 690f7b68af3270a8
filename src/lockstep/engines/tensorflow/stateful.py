"""Stateful RNNs, of whose state each replica takes the rows of its part of the batch."""

import threading
from typing import Any

import keras
import tensorflow as tf

from lockstep.engines.tensorflow.replicas import Replica, Team


def by_rows(rnn: Any, team: Team) -> list[tuple[Any, str, Any]]:
    """What a stateful RNN has, by name, for replicas that each run their rows of its state.

    Row i of every batch goes on where row i of the one before ended. Each replica reads its
    rows; those that all replicas leave are put together again, so that every copy of the state
    is whole, whoever reads, saves or resets it.
    """
    call, here = rnn.call, threading.local()

    def call_by_rows(*args: Any, **kwargs: Any) -> Any:
        # keras/src/layers/rnn/rnn.py, RNN.call: makes tensors of the states, and assigns to them.
        here.replica = team.current()
        try:
            return call(*args, **kwargs)
        finally:
            here.replica = None

    states = keras.tree.map_structure(lambda state: _ByRows(state, here, rnn.name), rnn.states)
    return [(rnn, "call", call_by_rows), (rnn, "states", states)]


class _ByRows:
    """One variable of a state; by rows within the call of its RNN, and whole to anybody else."""

    def __init__(self, state: Any, here: threading.local, name: str) -> None:
        self._state = state
        self._here = here
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        """The rows of this replica."""
        replica, state = self._replica(), tf.convert_to_tensor(self._state.value)
        if replica is not None:
            check = tf.debugging.assert_equal(
                replica.shards.rows,
                self._state.shape[0],
                f"lockstep: the state of {self._name!r} has {self._state.shape[0]} rows, and a "
                "batch has another number.",
            )
            with tf.control_dependencies([check]):
                state = replica.own(state)
        return state if dtype is None else tf.cast(state, dtype)

    def assign(self, value: Any) -> None:
        """Let the state be what all replicas assign, row by row."""
        replica = self._replica()
        if replica is not None:
            true = replica.true_rows(value, f"the state of {self._name!r}")
            value = tf.concat(replica.exchange(true), axis=0)
        self._state.assign(value)

    def _replica(self) -> Replica | None:
        replica: Replica | None = getattr(self._here, "replica", None)
        return replica
