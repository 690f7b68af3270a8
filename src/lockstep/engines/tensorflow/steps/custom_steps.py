"""Steps of a user's own on several replicas.

Every replica runs the code of the step on the global batch. Each call of a layer that works
row by row is split: a replica runs the layer on its rows, and the outputs are all-gathered.
`GradientTape.gradient` sums the gradients of all replicas. So the step sees what it sees on
one device, and the layers, which are nearly all of the work, are shared.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import tensorflow as tf

from lockstep.core.patched import patched
from lockstep.engines.rowwise import LOOKS_AT_ROWS, call_refused
from lockstep.engines.tensorflow.exchange.replica_consistency import (
    ReplicasDiffer,
    looks_up_weights,
    tensors_in,
)
from lockstep.engines.tensorflow.exchange.replicas import ReplicaGroup, RowShards, TracedReplica
from lockstep.engines.tensorflow.exchange.tensor_metadata import known_rows, remade, signature
from lockstep.engines.tensorflow.exchange.traced_operations import (
    every_operation,
    has_own_gradient,
)
from lockstep.engines.tensorflow.steps.layers import ReplicaPlan
from lockstep.engines.tensorflow.steps.scratch_graph import ScratchGraph
from lockstep.keras_compat import (
    added_losses,
    layers_in,
)
from lockstep.keras_compat.foreign_patches import replaced

Call = Callable[..., Any]


class CustomStep:
    """Runs one step of a model whose code may do anything with the batch.

    Attributes:
        whole: Why a layer runs on the global batch, by its name.
    """

    def __init__(
        self,
        model: Any,
        team: ReplicaGroup,
        name: str,
        *,
        distrusted: dict[int, str],
        watching: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`name` is that of the step, for errors. `Steps` has the other arguments."""
        self.whole: dict[str, str] = {}
        self._distrusted = distrusted
        self._watching = watching
        self._model = model
        self._team = team
        self._name = name
        self._calls: dict[int, tuple[Any, Call]] = {}
        self._known: dict[Any, str | None] = {}
        self._splits = 0
        self._rows: int | None = None
        self._open = threading.local()

    def run(self, step: Callable[[Any], Any], data: Any) -> Any:
        """Return what `step` returns for a global batch.

        Raises:
            ReplicasDiffer: If replicas cannot run this step.
        """
        if not all(
            leaf is None or isinstance(leaf, tf.Tensor) for leaf in keras.tree.flatten(data)
        ):
            raise ReplicasDiffer("it gets ragged or sparse tensors")
        self._rows = known_rows(data)
        data = keras.tree.map_structure(_with_hidden_rows, data)
        rows = [leaf for leaf in keras.tree.flatten(data) if leaf is not None and leaf.shape.rank]

        def on_replica(replica: TracedReplica) -> Any:
            given = (data, replica.shards.rows)
            # Gradients are checked where a tape computes them, and an optimizer has none.
            with replica.globally(self._name, given, shares=True, last=True) as part:
                outputs = step(data)
            if looks_up_weights(part.done):
                raise ReplicasDiffer(f"{self._name} looks up rows of a weight")
            return outputs

        layers = layers_in(self._model)
        self._calls = {id(layer): (layer, layer.call) for layer in layers}
        splitting = [(layer, "call", self._splitting(layer)) for layer in layers]
        try:
            with (
                ReplicaPlan.of_all(layers).in_force(self._team),
                patched(splitting),
                self._summing(),
                self._watching(),
            ):
                outputs = self._team.run(
                    on_replica, RowShards(tf.shape(rows[0])[0], self._team.size)
                )
        except ReplicasDiffer:
            raise
        except Exception as error:  # the step runs on one device then, and may raise it again
            raise ReplicasDiffer(f"{type(error).__name__} in {self._name}") from error
        if not self._splits:
            raise ReplicasDiffer(f"{self._name} calls no layer that is known to work row by row")
        return outputs[0]

    # ------------------------------------------------------------------------ layers

    def _splitting(self, layer: Any) -> Call:
        call = layer.call

        def split_call(*args: Any, **kwargs: Any) -> Any:
            replica = self._team.current_in_global_part()
            if replica is None or not replica.part or not replica.part.shares:
                return call(*args, **kwargs)
            leaves = [leaf for leaf in keras.tree.flatten((args, kwargs)) if _has_rows(leaf)]
            if not leaves:
                return call(*args, **kwargs)
            reason = self._why_whole(layer, args, kwargs)
            if reason == LOOKS_AT_ROWS:  # here it does not see the number that one device sees
                raise ReplicasDiffer(f"{layer.name!r} reads the number of rows")
            if reason is not None:
                self.whole.setdefault(layer.name, reason)
                return call(*args, **kwargs)
            self._splits += 1
            return self._split(replica, layer, call, args, kwargs, leaves)

        return split_call

    def _why_whole(self, layer: Any, args: Any, kwargs: Any) -> str | None:
        """Return why a call is not split, `None` if it is."""
        for number, (each, _) in enumerate(self._calls.values()):
            if number in self._distrusted and layer in layers_in(each):
                return self._distrusted[number]
        leaves = keras.tree.flatten((args, kwargs))
        tensors = [signature(leaf) for leaf in leaves if isinstance(leaf, tf.Tensor)]
        firsts = [leaf.shape[:1] for leaf in leaves if isinstance(leaf, tf.Tensor)]
        others = [repr(leaf) for leaf in leaves if not isinstance(leaf, tf.Tensor)]
        key = (id(layer), str((tensors, firsts, others)))
        if key not in self._known:
            with self._plain_calls(), tf.init_scope():
                self._known[key] = call_refused(
                    layer,
                    args,
                    kwargs,
                    rows=self._rows,
                    held=[each for each, _ in self._calls.values()],
                    scratch=ScratchGraph,
                )
        return self._known[key]

    @contextmanager
    def _plain_calls(self) -> Iterator[None]:
        """Call layers as their classes do inside the context."""
        before = [(layer, vars(layer).pop("call")) for layer, _ in self._calls.values()]
        try:
            yield
        finally:
            for layer, call in before:
                vars(layer)["call"] = call

    def _split(
        self,
        replica: TracedReplica,
        layer: Any,
        call: Call,
        args: Any,
        kwargs: Any,
        leaves: list[Any],
    ) -> Any:
        what = f"an input or output of {layer.name!r} ({type(layer).__name__})"
        before = {id(loss) for inner in layers_in(layer) for loss in added_losses(inner)}
        outer = replica.shards
        with replica.apart() as part:
            rows = tf.shape(leaves[0])[0]
            words = (
                f"lockstep: layer {layer.name!r} ({type(layer).__name__}) gets tensors with "
                "different numbers of rows in a custom step.\n"
                "To train on one device, call lockstep.release(model)."
            )
            same = [tf.debugging.assert_equal(tf.shape(x)[0], rows, words) for x in leaves[1:]]
            with tf.control_dependencies(same):
                rows = tf.identity(rows)
            replica.shards = RowShards(rows, self._team.size)
            try:
                args, kwargs = keras.tree.map_structure(
                    lambda x: remade(x, replica.rows_with_shared_gradient) if _has_rows(x) else x,
                    (args, kwargs),
                )
                own = call(*args, **kwargs)
                outputs = keras.tree.map_structure(
                    lambda x: (
                        remade(x, lambda part: replica.gather_replicated(part, what))
                        if isinstance(x, tf.Tensor) and x.shape.rank
                        else x
                    ),
                    own,
                )
            finally:
                replica.shards = outer
        losses = [loss for inner in layers_in(layer) for loss in added_losses(inner)]
        part.given += tensors_in((outputs, [loss for loss in losses if id(loss) not in before]))
        return outputs

    # ------------------------------------------------------------------------ gradients

    @contextmanager
    def _summing(self) -> Iterator[None]:
        """Let tapes return the gradients of the global batch in the code of the step."""
        plain = dict(vars(tf.GradientTape))
        step, team = self, self._team

        def enter(tape: Any) -> Any:
            replica = team.current_in_global_part()
            if replica is not None:
                step._tapes()[id(tape)] = (tape, _position(replica), None)
            return plain["__enter__"](tape)

        def leave(tape: Any, *error: Any) -> Any:
            replica = team.current_in_global_part()
            if replica is not None and id(tape) in step._tapes():
                _, start, _ = step._tapes()[id(tape)]
                step._tapes()[id(tape)] = (tape, start, _position(replica))
            return plain["__exit__"](tape, *error)

        def gradient(
            tape: Any,
            target: Any,
            sources: Any,
            output_gradients: Any = None,
            unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        ) -> Any:
            replica = team.current_in_global_part()
            if replica is None:
                return plain["gradient"](
                    tape, target, sources, output_gradients, unconnected_gradients
                )
            step._check(replica, tape)
            if output_gradients is None:
                output_gradients = tf.nest.map_structure(tf.ones_like, target)
            with replica.apart() as part:
                shares = tf.nest.map_structure(lambda g: g / team.size, output_gradients)
                own = plain["gradient"](tape, target, sources, shares, unconnected_gradients)
                summed = replica.sum_gradients(tf.nest.flatten(own))
            part.given += tensors_in(summed)
            return tf.nest.pack_sequence_as(own, summed)

        def refuse(tape: Any, *args: Any, **kwargs: Any) -> Any:
            if team.current_in_global_part() is not None:
                raise ReplicasDiffer(f"{step._name} computes a jacobian")
            raise NotImplementedError

        methods = {
            "__enter__": enter,
            "__exit__": leave,
            "gradient": gradient,
            "jacobian": refuse,
            "batch_jacobian": refuse,
        }
        with replaced([(tf.GradientTape, name, method) for name, method in methods.items()]):
            yield

    def _check(self, replica: TracedReplica, tape: Any) -> None:
        """Raise if the gradients of replicas would not sum up to those of the global batch."""
        if any(end is None for _, _, end in self._tapes().values()):
            raise ReplicasDiffer(f"{self._name} computes a gradient inside a tape")
        _, start, end = self._tapes().get(id(tape), (tape, 0, None))
        _position(replica)
        assert replica.part is not None
        if any(map(has_own_gradient, every_operation(replica.part.done[start:end]))):
            raise ReplicasDiffer(f"{self._name} has a custom gradient")

    def _tapes(self) -> dict[int, tuple[Any, int, int | None]]:
        """Return the tapes of this replica: where each began and ended in the section."""
        if not hasattr(self._open, "tapes"):
            self._open.tapes = {}
        tapes: dict[int, tuple[Any, int, int | None]] = self._open.tapes
        return tapes


def _position(replica: TracedReplica) -> int:
    """Return the number of operations in the section of a replica."""
    assert replica.part is not None
    replica.part.pause()
    replica.part.resume()
    return len(replica.part.done)


def _with_hidden_rows(leaf: Any) -> Any:
    if leaf is None or not leaf.shape.rank:
        return leaf
    return tf.compat.v1.placeholder_with_default(leaf, (None, *leaf.shape[1:]))


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank) and leaf.shape[0] is None
