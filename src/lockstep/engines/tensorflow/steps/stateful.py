"""Stateful RNNs on several replicas; each replica runs its own rows of the state."""

import threading
from typing import Any

import keras
import tensorflow as tf

from lockstep.engines.tensorflow.exchange.replicas import ReplicaGroup, TracedReplica
from lockstep.errors import counted


def by_rows(rnn: Any, team: ReplicaGroup) -> list[tuple[Any, str, Any]]:
    """Return the attributes to patch so that each replica runs its rows of an RNN's state.

    Row i of a batch continues row i of the batch before. Each replica reads its rows of the
    state. The new rows of all replicas are gathered, so every copy of the state is complete
    when it is read, saved or reset.

    Returns:
        Tuples of the RNN, the name of an attribute, and its new value.
    """
    call, here = rnn.call, threading.local()

    def call_by_rows(*args: Any, **kwargs: Any) -> Any:
        # keras/src/layers/rnn/rnn.py, RNN.call converts the states to tensors and assigns to them.
        here.replica = team.current()
        try:
            return call(*args, **kwargs)
        finally:
            here.replica = None

    states = keras.tree.map_structure(lambda state: _ByRows(state, here, rnn.name), rnn.states)
    return [(rnn, "call", call_by_rows), (rnn, "states", states)]


class _ByRows:
    """One state variable: sharded inside the call of its RNN, complete elsewhere."""

    def __init__(self, state: Any, here: threading.local, name: str) -> None:
        self._state = state
        self._here = here
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        """Return this replica's rows inside a call of the RNN, else the whole state."""
        replica, state = self._replica(), tf.convert_to_tensor(self._state.value)
        if replica is not None:
            check = tf.debugging.assert_equal(
                replica.shards.rows,
                self._state.shape[0],
                f"lockstep: the state of {self._name!r} has "
                f"{counted(self._state.shape[0], 'row')}, but the batch has a different number.",
            )
            with tf.control_dependencies([check]):
                state = replica.rows_of(state)
        return state if dtype is None else tf.cast(state, dtype)

    def assign(self, value: Any) -> None:
        """Assign the gathered rows of all replicas."""
        replica = self._replica()
        if replica is not None:
            true = replica.true_rows(value, f"the state of {self._name!r}")
            value = tf.concat(replica.exchange(true), axis=0)
        self._state.assign(value)

    def _replica(self) -> TracedReplica | None:
        replica: TracedReplica | None = getattr(self._here, "replica", None)
        return replica
