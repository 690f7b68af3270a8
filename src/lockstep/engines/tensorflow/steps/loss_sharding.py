"""Losses and metrics that each replica computes on its own rows; see `rows_of_losses`.

Where it may not, the function is called with the gathered outputs. TensorFlow prunes unused
operations from a step, so outputs that every function takes by rows are not gathered.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from lockstep.core.patched import patched
from lockstep.engines.replicas.rows_of_losses import (
    is_of_keras,
    losses_by_rows,
    metrics_by_rows,
    why_whole,
    wrapped_function,
)
from lockstep.engines.tensorflow.exchange.replica_consistency import tensors_in
from lockstep.engines.tensorflow.exchange.replicas import ReplicaGroup, TracedReplica
from lockstep.engines.tensorflow.exchange.tensor_metadata import known_rows, remade, signature
from lockstep.engines.tensorflow.steps.scratch_graph import ScratchGraph
from lockstep.keras_compat import METRIC_FUNCTION


class LossSharding:
    """Shards the losses and metrics of one step over the replicas where this is exact.

    Attributes:
        choices: For each name of a loss or metric: `None` if each replica takes its own rows,
            else the reason why it takes the outputs of the global batch.
    """

    def __init__(self, model: Any, team: ReplicaGroup, x: Any, y: Any) -> None:
        """`x` and `y` are the inputs and targets of the global batch."""
        self.choices: dict[str, str | None] = {}
        self._model = model
        self._team = team
        self._targets = {id(leaf): leaf for leaf in keras.tree.flatten(y)}
        self._rows = known_rows(x)
        self._own: dict[int, tuple[Any, Any]] = {}
        self._reasons: dict[tuple[Any, ...], str | None] = {}

    def gather(self, replica: TracedReplica, output: Any, what: str) -> Any:
        """All-gather an output of the model, with its Keras mask and logits."""

        def gathered(part: Any) -> Any:
            whole = replica.gather_replicated(part, what)
            if whole.shape.rank:  # a function sees the same static shape as on one device
                whole.set_shape([self._rows, *whole.shape[1:]])
            return whole

        whole = remade(output, gathered)
        self._own[id(whole)] = (whole, output)
        return whole

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Shard losses and metrics inside the context, where this is exact."""
        losses = [(loss, "call") for loss in losses_by_rows(self._model)]
        metrics = [(metric, METRIC_FUNCTION) for metric in metrics_by_rows(self._model)]
        changes = [
            (owner, name, self._taking_rows(owner, getattr(owner, name)))
            for owner, name in [*losses, *metrics]
        ]
        with patched(changes):
            yield

    def _taking_rows(self, owner: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        def values(*given: Any, **options: Any) -> Any:
            replica = self._team.current_in_global_part()
            if replica is None or len(given) != 2:
                return function(*given, **options)
            y_true, y_pred = given
            with replica.apart() as part:
                own = self._rows_in_part(y_pred)
                reason = self._why_gathered(owner, function, options, y_true, own)
                self.choices[owner.name] = self.choices.get(owner.name) or reason
                if reason is None:
                    found = self._of_all_rows(replica, owner, function, options, y_true, own)
            if reason is None:
                part.given += tensors_in(found)
                return found
            return function(y_true, y_pred, **options)

        return values

    def _why_gathered(
        self, owner: Any, function: Any, options: dict[str, Any], y_true: Any, own: Any
    ) -> str | None:
        """Return why a loss or metric takes gathered outputs, `None` if it takes own rows."""
        if own is None or id(_before_casts(y_true)) not in self._targets:
            return "its arguments are not the outputs and targets of the model"
        if not isinstance(y_true, tf.Tensor) or not (y_true.shape.rank and own.shape.rank):
            return "its targets or the outputs have no rows"
        if y_true.shape[0] == 1:
            return "a single row is broadcast to all rows"
        key = (id(owner), y_true.shape[0], signature(y_true), signature(own))
        if key not in self._reasons:
            with tf.init_scope():
                self._reasons[key] = why_whole(owner, function, options, y_true, own, ScratchGraph)
        return self._reasons[key]

    def _of_all_rows(
        self,
        replica: TracedReplica,
        owner: Any,
        function: Any,
        options: dict[str, Any],
        y_true: Any,
        own: Any,
    ) -> Any:
        name, rows = owner.name, replica.shards.rows
        what = f"the targets of {name!r}"
        check = tf.debugging.assert_equal(
            tf.shape(y_true)[:1],
            tf.reshape(rows, (1,)),
            f"lockstep: {what} have a different number of rows than the inputs. To train on one "
            "device, call lockstep.release(model).",
        )
        # Keras's own functions ignore the static number of rows; a user's function may not.
        known = None if is_of_keras(wrapped_function(owner, function)) else y_true.shape[0]
        size = replica.shards.size_of(known, replica.index)

        def with_size(part: Any) -> Any:
            part = tf.identity(part)
            part.set_shape([size, *part.shape[1:]])
            return part

        with tf.control_dependencies([check]):
            y_true = replica.rows_of(y_true)
        if size is not None:
            y_true, own = with_size(y_true), remade(own, with_size)
        with replica.same_operations(f"{name!r}"):
            found = function(y_true, own, **options)
        return remade(
            found, lambda part: replica.gather_replicated(part, f"the result of {name!r}")
        )

    def _rows_in_part(self, given: Any) -> Any:
        """Return this replica's rows of a gathered output with the same casts, else `None`."""
        whole = _before_casts(given)
        if id(whole) not in self._own:
            return None
        own = self._own[id(whole)][1]
        for dtype in _casts(given):
            own = tf.cast(own, dtype)
        return own


def _before_casts(tensor: Any) -> Any:
    while isinstance(tensor, tf.Tensor) and tensor.op.type == "Cast":
        tensor = tensor.op.inputs[0]
    return tensor


def _casts(tensor: Any) -> list[Any]:
    """Return the types that a tensor was cast to, in order."""
    found = []
    while tensor.op.type == "Cast":
        found.append(tensor.dtype)
        tensor = tensor.op.inputs[0]
    return found[::-1]
