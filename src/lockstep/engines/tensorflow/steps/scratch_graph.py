"""A graph that nobody runs, for what a followed layer computes without the batch."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from lockstep.engines.rowwise import NotRowByRow, is_following
from lockstep.engines.tensorflow.exchange.traced_operations import is_repeatable, program_of
from lockstep.engines.tensorflow.tensorflow_compat import FuncGraph
from lockstep.keras_compat.foreign_patches import replaced


class ScratchGraph:
    """What a followed layer computes without the batch, as a graph; see `rowwise.Scratch`.

    In a graph, Python cannot branch on the value of a weight, and nothing is assigned.
    """

    def __init__(self) -> None:
        # Without `collections`, the graph would share the variable scope of the process.
        self._graph = FuncGraph("lockstep_rowwise", collections={})
        self._done = 0
        with self._graph.as_default():
            self.kind = self.count_kind = type(tf.constant(0))

    def dtype(self, name: str) -> Any:
        """Return the dtype of this name."""
        return tf.as_dtype(name)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Trace into this graph inside the context."""
        with self._graph.as_default(), replaced([(tf, "gather", _followed_gather)]):
            yield

    def describe(self, tensor: Any) -> Any:
        """Return the name of a tensor of this graph, or the value of another one."""
        if hasattr(tensor, "numpy") and not isinstance(tensor, tf.Variable):
            return str(tensor.dtype), tuple(tensor.shape), tensor.numpy().tobytes()
        if getattr(tensor, "graph", None) is not self._graph:
            raise NotRowByRow("state outside of it")
        return tensor.name

    def cut(self) -> tuple[Any, str | None]:
        """Return a description of the operations since the last call, and why they may differ."""
        operations = self._graph.get_operations()[self._done :]
        self._done += len(operations)
        captures = list(self._graph.captures)
        variables = {id(inner): id(outer) for outer, inner in captures if _is_resource(outer)}
        for op in operations:
            if not is_repeatable(op):
                return None, op.type
        for outer, _ in captures:
            if not _is_resource(outer) and not hasattr(outer, "numpy"):
                return None, "state outside of it"
        return program_of(operations, variables), None


_gather = tf.gather


@functools.wraps(_gather)
def _followed_gather(*args: Any, **kwargs: Any) -> Any:
    """Follow `tf.gather` along the last dim as an operation of `keras.ops`.

    Layers of KerasHub call it on TensorFlow, for a shape that is not known.
    """
    names = ("params", "indices", "validate_indices", "axis", "batch_dims")
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    params: Any = given.get("params")
    indices: Any = given.get("indices")
    if is_following() and all(map(keras.utils.is_keras_tensor, (params, indices))):
        last = len(params.shape) - 1
        is_last = given.get("axis") in (None, -1, last) and len(indices.shape) - 1 == last
        if is_last and given.get("batch_dims") == last:
            return keras.ops.take_along_axis(params, indices, axis=last)
    return _gather(*args, **kwargs)


def _is_resource(tensor: Any) -> bool:
    return bool(tensor.dtype == tf.resource)
