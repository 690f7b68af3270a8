"""Stateful RNNs, of whose state each replica takes the rows of its part of the batch."""

from typing import Any

import keras
import tensorflow as tf

from lockstep.engines.tensorflow_replicas import Team


def by_rows(rnn: Any, team: Team) -> Any:
    """The states of a stateful RNN, for replicas that each run their rows of it.

    Row i of every batch goes on where row i of the one before ended. Each replica reads its
    rows; those that all replicas leave are put together again, so that every copy of the state
    is whole, whoever reads, saves or resets it.
    """
    # keras/src/layers/rnn/rnn.py, RNN.call: converts them to tensors, and assigns to them.
    return keras.tree.map_structure(lambda state: _ByRows(state, team, rnn.name), rnn.states)


class _ByRows:
    """One variable of a state, as the replica sees it that runs."""

    def __init__(self, state: Any, team: Team, name: str) -> None:
        self._state = state
        self._team = team
        self._name = name

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        """The rows of this replica."""
        replica, state = self._team.current(), tf.convert_to_tensor(self._state.value)
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
        replica = self._team.current()
        if replica is not None:
            true = replica.true_rows(value, f"the state of {self._name!r}")
            value = tf.concat(replica.exchange(true), axis=0)
        self._state.assign(value)
