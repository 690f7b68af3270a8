"""Private parts of the graph of a functional model: its operations, nodes and inner graphs."""

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from lockstep.keras_compat.foreign_patches import replaced
from lockstep.keras_compat.rows import Functional, _Function, _named, _Node, _read

# keras/src/ops/function.py and operation.py

RUN_GRAPH = _named(Functional, "_run_through_graph")
"""The method that runs a functional graph."""
_inner_graph = _read(keras.Sequential, "_functional", None)
_operations = _read(_Function, "_operations", None)
_nodes_by_depth = _read(_Function, "_nodes_by_depth")
_structure_of_inputs = _read(_Function, "_inputs_struct")
_structure_of_outputs = _read(_Function, "_outputs_struct")
_history = _read(_Node, "_keras_history", None)
calls_of = _read(keras.Operation, "_inbound_nodes", to=list)
"""The nodes of all symbolic calls of an operation."""


def operations_of(container: Any) -> list[Any]:
    """The layers and other operations that a container calls."""
    operations = _operations(_inner_graph(container) or container)
    return list(container.layers if operations is None else operations)


def node_of(tensor: Any) -> Any:
    """The node of the call that made a symbolic tensor, `None` for other tensors."""
    history = _history(tensor)
    return None if history is None else calls_of(history.operation)[history.node_index]


def functional_of(layer: Any) -> Any:
    """The functional graph that a model runs, `None` where it has none.

    A `Sequential` that is built has one inside.
    """
    return layer if isinstance(layer, Functional) else _inner_graph(layer)


def inputs_and_outputs(function: Any) -> tuple[Any, Any]:
    """The symbolic inputs and outputs of a functional graph, in their structures."""
    return _structure_of_inputs(function), _structure_of_outputs(function)


def nodes_of(function: Any) -> list[Any]:
    """The calls of a functional graph, in the order in which Keras runs them."""
    by_depth = _nodes_by_depth(function)
    every = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node for node in every if node.operation and not node.is_input]


def run_graph(
    function: Any, around: Callable[[Any], Any], inputs: Any, operation_fn: Any, call_fn: Any
) -> Any:
    """Run a functional graph, with each call inside a context of its own.

    keras/src/ops/function.py, Function._run_through_graph, which does the same without contexts.

    Args:
        function: The functional model.
        around: Makes the context of a call from its node.
        inputs: The inputs of the model.
        operation_fn: Makes the function to call from an operation.
        call_fn: Calls that function; `None` to call it directly.
    """
    known = dict(zip(map(id, function.inputs), keras.tree.flatten(inputs), strict=False))
    for node in nodes_of(function):
        if any(id(x) not in known for x in node.input_tensors):
            continue
        args, kwargs = node.arguments.fill_in(known)
        call = operation_fn(node.operation)
        with around(node):
            outputs = call(*args, **kwargs) if call_fn is None else call_fn(call, *args, **kwargs)
        known.update(zip(map(id, node.outputs), keras.tree.flatten(outputs), strict=False))
    # Keras refuses a graph that is not connected when it makes the model.
    return keras.tree.pack_sequence_as(
        _structure_of_outputs(function), [known[id(x)] for x in function.outputs]
    )


def _is_in_sequential() -> bool:
    """Whether a `Sequential` makes its functional graph now.

    keras/src/models/sequential.py, Sequential.build
    """
    build = keras.Sequential.build.__code__
    return any(frame.f_code is build for frame, _ in traceback.walk_stack(None))


@contextmanager
def nodes_reported(report: Callable[[Any], None]) -> Iterator[None]:
    """Call `report` with each node of a functional graph that is made inside the context.

    keras/src/ops/node.py, Node, which a call on symbolic tensors makes. The nodes of the graph that
    a `Sequential` makes of itself are left out (keras/src/models/sequential.py, Sequential.build).
    """
    make = _Node.__init__

    @functools.wraps(make)
    def make_and_report(node: Any, *args: Any, **kwargs: Any) -> None:
        make(node, *args, **kwargs)
        if not _is_in_sequential():
            report(node)

    with replaced([(_Node, "__init__", make_and_report)]):
        yield


_REPORTS = "_lockstep_reports"


def report_functional_models(report: Callable[[Any], None]) -> None:
    """Call `report` with each functional model that is made from now on.

    keras/src/models/functional.py, Functional.__init__. A second call changes nothing.
    """
    make = Functional.__init__
    if hasattr(make, _REPORTS):
        return

    @functools.wraps(make)
    def make_and_report(model: Any, *args: Any, **kwargs: Any) -> None:
        make(model, *args, **kwargs)
        if not _is_in_sequential():
            report(model)

    setattr(make_and_report, _REPORTS, True)
    # Keras compares the arguments of constructors when it loads a model.
    vars(make_and_report)["__signature__"] = inspect.signature(make)
    Functional.__init__ = make_and_report
