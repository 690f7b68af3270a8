"""The device of every operation of a traced step.

TensorFlow asks a device function about each operation when it is made, those in loops and
conditions included. A layer runs in a name scope that names its device. `tf.GradientTape` makes the
derivative of an operation in the name scope of that operation. So the derivative has its device.
An operation outside of these scopes, as in a loss or an optimizer, follows its largest input.
"""

import re
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

_DEVICE = re.compile(r"lockstep_device_([a-z]+)_(\d+)")


def device_scope(device: str) -> AbstractContextManager[Any]:
    """Return the name scope of operations that run on the device with this name."""
    scope: AbstractContextManager[Any] = tf.name_scope(
        f"lockstep_device_{device.replace(':', '_')}"
    )
    return scope


class OpDevices:
    """A device function for the operations of one trace.

    Args:
        main: The name of the device of what depends on no device.
    """

    def __init__(self, main: str) -> None:
        self._main = f"/device:{main.upper()}"
        self._captured: dict[tuple[int, str], Any] = {}

    def in_force(self) -> AbstractContextManager[Any]:
        """Give the operations of the graph that is being traced their devices in the context."""
        # `tf.device` refuses a function, and the graph takes one.
        graph: Any = tf.compat.v1.get_default_graph()
        context: AbstractContextManager[Any] = graph.device(self._device)
        return context

    def _device(self, op: Any) -> str:
        if op.device:
            return str(op.device)
        if op.type == "Placeholder":  # what a graph is given: the device is that of its source
            return ""
        return self._of_variable(op) or _of_scope(op.graph) or self._of_inputs(op) or self._main

    def _of_variable(self, op: Any) -> str:
        """Return the device of the variable that an operation reads or writes, "" for others."""
        inputs = op.inputs
        if not inputs or inputs[0].dtype != tf.resource or _calls_functions(op):
            return ""
        return self._of_tensor(inputs[0])

    def _of_inputs(self, op: Any) -> str:
        found = [(tensor, self._of_tensor(tensor)) for tensor in op.inputs]
        known = [(_size(tensor), device) for tensor, device in found if device]
        return max(known, key=lambda each: each[0])[1] if known else ""

    def _of_tensor(self, tensor: Any) -> str:
        if not hasattr(tensor, "graph"):  # a value from outside of all graphs
            return str(tensor.device)
        op = tensor.op
        if op.type == "Placeholder":
            source = self._source(tensor)
            return "" if source is None else self._of_tensor(source)
        # A read of a variable has no device of its own: TensorFlow makes it under no device scope.
        return str(op.device) or self._of_variable(op)

    def _source(self, inner: Any) -> Any:
        """Return the tensor outside of a graph that a placeholder of the graph stands for."""
        key = id(inner.graph), inner.op.name
        if key not in self._captured:
            for outer, placeholder in inner.graph.captures:
                self._captured[id(inner.graph), placeholder.op.name] = outer
        return self._captured.get(key)


def _of_scope(graph: Any) -> str:
    """Return the device of the innermost scope around an operation that is made now, or ""."""
    while graph is not None:
        found = _DEVICE.findall(graph.get_name_scope())
        if found:
            platform, number = found[-1]
            return f"/device:{platform.upper()}:{number}"
        graph = getattr(graph, "outer_graph", None)
    return ""


def _calls_functions(op: Any) -> bool:
    return any(each.type in ("func", "list(func)") for each in op.op_def.attr)


def _size(tensor: Any) -> tuple[int, int]:
    """Return a number that grows with a tensor. A tensor with an unknown dim counts as larger."""
    rank = tensor.shape.rank
    if rank is None:
        return 1, 0
    known = 1
    for size in tensor.shape:
        known *= size or 1
    return int(None in tensor.shape), known
