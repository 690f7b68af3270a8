"""The plan by which each layer of a split model runs while a step is traced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from lockstep.core.patched import patched
from lockstep.core.state import unique
from lockstep.engines.replicas.layer_plan import LayerPlan
from lockstep.engines.rowwise import call_name
from lockstep.engines.tensorflow.exchange.replica_consistency import ReplicasDiffer, tensors_in
from lockstep.engines.tensorflow.exchange.replicas import ReplicaGroup
from lockstep.engines.tensorflow.exchange.tensor_metadata import remade
from lockstep.engines.tensorflow.steps.draws_by_rows import draws_of_one_device
from lockstep.engines.tensorflow.steps.moments import moments_over
from lockstep.engines.tensorflow.steps.stateful import by_rows
from lockstep.keras_compat import (
    MOMENTS,
    added_losses,
    change_added_losses,
    get_keras_mask,
    layers_in,
    set_keras_mask,
)


class ReplicaPlan(LayerPlan):
    """Runs each layer of a model in a replica as its `LayerPlan` says."""

    @contextmanager
    def in_force(self, team: ReplicaGroup, rows: int | None = None) -> Iterator[None]:
        """Apply this plan to the layers inside the context, in the replicas of `team`.

        `rows` is the static number of rows of the batch, if there is one.
        """
        changes: list[tuple[Any, str, Any]] = []
        for layer in self.whole:
            name = call_name(layer)
            call = _on_global_batch(layer, getattr(layer, name), team, rows)
            changes.append((layer, name, call))
            if hasattr(layer, "compute_mask"):
                mask = _on_global_batch(layer, layer.compute_mask, team, rows)
                changes.append((layer, "compute_mask", mask))
        for rnn in unique(self.stateful):
            changes += by_rows(rnn, team)
        changes += [(layer, MOMENTS, moments_over(layer, team)) for layer in unique(self.norms)]
        for layer in unique([*self.every, *self.whole]):
            regularizer = getattr(layer, "activity_regularizer", None)  # operations have none
            if regularizer is not None:
                hook = _of_global_outputs(layer, regularizer, team)
                changes.append((layer, "activity_regularizer", hook))
        for layer in unique(self.every):
            if isinstance(layer, keras.layers.Embedding) and layer not in self.whole:
                changes.append((layer, "call", _looking_up(layer, layer.call, team)))
        with patched(changes), draws_of_one_device(team):
            yield


def _on_global_batch(
    layer: Any, call: Callable[..., Any], team: ReplicaGroup, rows: int | None
) -> Callable[..., Any]:
    """Wrap `call`: gather the rows of its inputs, return this replica's rows of its outputs."""
    what = f"an input or output of {layer.name!r} ({type(layer).__name__})"

    def gathered_call(*args: Any, **kwargs: Any) -> Any:
        replica = team.current()
        if replica is None:
            return call(*args, **kwargs)

        def whole(value: Any) -> Any:
            if isinstance(value, _COMPOSITE):
                raise ReplicasDiffer(f"{layer.name!r} takes a sparse or ragged tensor")
            if not _has_rows(value):
                return value
            gathered = replica.gather(value, what)
            gathered.set_shape([rows, *gathered.shape[1:]])  # as on one device
            mask = get_keras_mask(value)
            if mask is not None:
                set_keras_mask(gathered, replica.gather(mask, what))
            return gathered

        def own(value: Any) -> Any:
            if isinstance(value, _COMPOSITE):
                raise ReplicasDiffer(f"{layer.name!r} returns a sparse or ragged tensor")
            if not tf.is_tensor(value):
                return value
            if value.shape.rank == 0:
                return replica.rows_of_replicated(value)
            known = value.shape[0] is not None and value.shape[0] != rows
            if known and None in value.shape[1:]:  # a stack of batches
                raise ReplicasDiffer(
                    f"the first dim of the output of {layer.name!r} is not the batch"
                )
            check = tf.debugging.assert_equal(
                tf.shape(value)[:1], tf.reshape(replica.shards.rows, (1,)), _unaligned(layer)
            )
            with tf.control_dependencies([check]):
                return remade(
                    value,
                    lambda part: part if part.shape[0] == 1 else replica.rows_of_replicated(part),
                )

        loses_rows = replica.index == 0 and _loses_rows(layer, call, args, kwargs)
        args, kwargs = keras.tree.map_structure(whole, (args, kwargs))
        before = {id(loss) for inner in layers_in(layer) for loss in added_losses(inner)}
        with replica.globally(f"{layer.name!r} ({type(layer).__name__})", (args, kwargs)):
            if loses_rows:
                raise ReplicasDiffer(
                    f"the first dim of the output of {layer.name!r} is not the batch"
                )
            outputs = call(*args, **kwargs)
        for inner in layers_in(layer):
            losses = [
                loss if id(loss) in before else replica.rows_of_replicated(tf.reduce_sum(loss))
                for loss in added_losses(inner)
            ]
            change_added_losses(inner, losses)
        return keras.tree.map_structure(own, outputs)

    return gathered_call


def _looking_up(layer: Any, call: Callable[..., Any], team: ReplicaGroup) -> Callable[..., Any]:
    """Wrap the `call` of an embedding, which a loss of the global batch may use as well."""

    def look_up(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        replica = team.current_in_global_part()
        if replica is None or replica.part is None or not replica.part.shares:
            return call(inputs, *args, **kwargs)
        inputs = tf.identity(tf.convert_to_tensor(inputs))  # the section checks where it is from
        if not inputs.dtype.is_integer:
            return call(inputs, *args, **kwargs)
        with replica.apart() as part, replica.same_operations(f"{layer.name!r}"):
            found = replica.looked_up(call(inputs, *args, **kwargs))
        part.given += tensors_in(found)
        return found

    return look_up


_COMPOSITE = (tf.SparseTensor, tf.RaggedTensor)
"""Tensors whose rows are not the entries of a first dim. Replicas do not exchange them."""


def _has_rows(value: Any) -> bool:
    # The number of a replica's rows is unknown while tracing. So a tensor with a known
    # first dim has no rows.
    return isinstance(value, tf.Tensor) and value.shape.rank != 0 and value.shape[0] is None


def _loses_rows(layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return whether the shapes say that the first dim of what a layer gives is not the batch.

    An example is the mean over the batch. Shapes that nothing is known of say so when they run.
    """

    def first_dims(rows: int) -> list[Any]:
        def symbolic(value: Any) -> Any:
            if not _has_rows(value):
                return value
            return keras.KerasTensor((rows, *value.shape[1:]), value.dtype.name)

        args_of, kwargs_of = keras.tree.map_structure(symbolic, (args, kwargs))
        with patched([(layer, "call", call)]):
            outputs = keras.tree.flatten(layer.compute_output_spec(*args_of, **kwargs_of))
        return [output.shape[0] if output.shape else None for output in outputs]

    numbers = 1009, 1013
    try:
        found = [first_dims(rows) for rows in numbers]
    except Exception:  # the layer may need the values
        return False
    return any(
        None not in dims and all(dim != rows for dim, rows in zip(dims, numbers, strict=True))
        for dims in zip(*found, strict=True)
    )


def _unaligned(layer: Any) -> str:
    return (
        f"lockstep: layer {layer.name!r} ({type(layer).__name__}) merges the batch dim with "
        "another dim or drops it, so its output cannot be split by rows on TensorFlow.\n"
        "Keep the batch as the first dim, or set KERAS_BACKEND=jax, where any layer works."
    )


def _of_global_outputs(layer: Any, regularizer: Any, team: ReplicaGroup) -> Callable[[Any], Any]:
    """Wrap an activity regularizer to see the outputs of all replicas."""
    what = f"the output of {layer.name!r}"

    def regularize(output: Any) -> Any:
        replica = team.current()
        if replica is None or output.shape.rank == 0:
            return regularizer(output)
        whole = replica.gather_replicated(output, what)
        with replica.globally(f"the regularizer of {layer.name!r}", whole):
            loss = regularizer(whole)
        # keras/src/layers/layer.py, Layer.__call__ divides by the rows of `output`.
        rows = tf.cast(tf.shape(output)[0], loss.dtype)
        return tf.math.divide_no_nan(loss * rows, tf.cast(tf.shape(whole)[0], loss.dtype))

    return regularize
