"""Traced operations: their description for comparison, and a graph that nobody runs."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from lockstep.engines.rowwise import NotRowByRow, is_following
from lockstep.engines.tensorflow.tensorflow_compat import (
    GRADIENTS_BY_ROWS,
    OWN_GRADIENTS,
    FuncGraph,
    function_def_to_graph,
    get_variable_scope,
    ops,
)
from lockstep.keras_compat.foreign_patches import replaced

_REPEATABLE = """
    AssignAddVariableOp AssignSubVariableOp AssignVariableOp Assert Case If LookupTableFindV2
    LookupTableSizeV2 Print PrintV2 ReadVariableOp ResourceGather ResourceGatherNd
    ResourceScatterAdd ResourceScatterDiv ResourceScatterMax ResourceScatterMin
    ResourceScatterMul ResourceScatterNdAdd ResourceScatterNdMax ResourceScatterNdMin
    ResourceScatterNdSub ResourceScatterNdUpdate ResourceScatterSub ResourceScatterUpdate
    ResourceStridedSliceAssign StatefulPartitionedCall VarIsInitializedOp VariableShape While
"""
_REPEATABLE_TYPES = frozenset(_REPEATABLE.split())


def is_repeatable(op: Any) -> bool:
    """Return whether an operation has the same result on every replica.

    Of the stateful ones these are mostly on variables. Memory that is not set has any values.
    """
    repeatable = op.type in _REPEATABLE_TYPES or (op.type == "Empty" and op.get_attr("init"))
    return repeatable or not op.op_def.is_stateful


@contextmanager
def eager_variable_scope() -> Iterator[None]:
    """Keep a failed trace from spoiling the variable scope of the process.

    `tf.scan`, `tf.foldl` and `tf.foldr` set a caching device on this scope and leave it there if
    they raise. TensorFlow can then assign no mirrored variable: with eager execution there is no
    caching device.
    """
    _forget_caching_device()
    try:
        yield
    finally:
        _forget_caching_device()


def _forget_caching_device() -> None:
    # tensorflow/python/ops/variable_scope.py, VariableScope.set_caching_device
    if tf.executing_eagerly():
        get_variable_scope()._caching_device = None


class ScratchGraph:
    """A graph for what a followed layer computes without the batch; see `Scratch`.

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


def program_of(operations: list[Any], variables: Mapping[int, Any] | None = None) -> list[Any]:
    """Return a description of operations that is equal for two traces of the same code.

    A constant is described where it is used, not as an operation: a second use of a constant
    from outside the graph adds no operation.

    Args:
        operations: The operations, in the order in which they were made.
        variables: A name for each captured variable, by the identity of the tensor that
            represents it inside the graph.
    """
    known: dict[int, Any] = dict(variables or {})
    others: dict[int, int] = {}  # numbered in the order of use
    done: list[Any] = []
    for op in operations:
        if op.type in ("Placeholder", "Const"):
            continue
        # The message of an assertion contains names of tensors, which differ between traces.
        inputs = op.inputs[:1] if op.type == "Assert" else op.inputs
        sources = [
            source.op.node_def.attr["value"].SerializeToString()
            if source.op.type == "Const"
            else known.get(id(source)) or others.setdefault(id(source), len(others))
            for source in inputs
        ]
        inside = [program_of(graph.get_operations()) for graph in calls_of(op)]
        for number, output in enumerate(op.outputs):
            known[id(output)] = (len(done), number)
        kind = "" if _is_function(op) else op.type  # it has a name of its own at each trace
        done.append((kind, _options(op), sources, inside))
    return done


def _options(op: Any) -> dict[str, Any]:
    """Return the attributes of an operation, without names, shapes and functions."""
    kinds = ("bool", "float", "int", "list(float)", "list(int)", "string", "type")
    names = ("container", "message", "shared_name", "token")
    return {
        each.name: op.get_attr(each.name)
        for each in op.op_def.attr
        if each.type in kinds and each.name not in names
    }


def attribute(op: Any, name: str) -> Any:
    """Return an attribute of an operation, `None` if it is missing."""
    try:
        return op.get_attr(name)
    except ValueError:
        return None


def function_of(op: Any, name: str) -> Any:
    """Return the graph of a function that an operation calls."""
    return _graph_of(op, attribute(op, name).name)


def _is_function(op: Any) -> bool:
    """Return whether an operation is a call of a function that it has its type from."""
    return bool(op.graph._is_function(op.type))


def _graph_of(op: Any, name: str) -> Any:
    function = op.graph._get_function(name)
    if hasattr(function, "graph"):
        return function.graph
    # tensorflow/python/framework/function.py, _DefinedFunction, which the CTC loss of Keras uses
    return function_def_to_graph(function.definition)


def calls_of(op: Any) -> list[Any]:
    """Return the graphs of all functions that an operation calls."""
    found = [_graph_of(op, op.type)] if _is_function(op) else []
    for description in op.op_def.attr:
        if description.type == "func":
            found.append(function_of(op, description.name))
        elif description.type == "list(func)":
            found += [_graph_of(op, f.name) for f in op.get_attr(description.name)]
    return found


def has_own_gradient(op: Any) -> bool:
    """Return whether an operation has a custom gradient that lockstep does not know."""
    name = attribute(op, "_gradient_op_type")
    if name is None or op.type.endswith("PartitionedCall"):  # its own operations are checked
        return False
    # tensorflow/python/ops/custom_gradient.py, _graph_mode_decorator: the user's gradient
    # function is in the closure of the registered function.
    found, looked = [ops.gradient_registry.lookup(name.decode())], []
    while found:
        function = found.pop()
        looked.append(function)
        for cell in function.__closure__ or ():
            inner = cell.cell_contents
            if hasattr(inner, "__closure__") and inner not in looked:
                found.append(inner)
    own = [f for f in looked if f.__module__ != OWN_GRADIENTS]
    return not own or any(f.__module__ not in GRADIENTS_BY_ROWS for f in own)


def every_operation(operations: Iterable[Any]) -> Iterator[Any]:
    """Yield operations, and those of all functions that they call."""
    for op in operations:
        yield op
        for graph in calls_of(op):
            yield from every_operation(graph.get_operations())
