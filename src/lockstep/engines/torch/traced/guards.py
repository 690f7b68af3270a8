"""When a compiled program may run in place of its graph, which raises the errors of PyTorch.

On CPUs, a compiled program ends the process where PyTorch raises: at an index out of range, and
at a division of integers by zero. It takes tensors in the strides that it was compiled for alone.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from lockstep.engines.torch.traced.graph import is_draw, is_exchange

aten = torch.ops.aten


class _Index(NamedTuple):
    """An index of an operation: its node, its bounds, and a value that is skipped."""

    node: Node
    least: int
    end: int
    skipped: int | None = None


class Guard:
    """Tells whether a compiled program computes what its graph does.

    Args:
        module: The graph.
        inputs: The inputs for which it was compiled.
        variables: How many of them are variables. The others are of the batch.
    """

    def __init__(self, module: GraphModule, inputs: list[Any], variables: int) -> None:
        self._strides = [each.stride() for each in inputs]
        self._indices = _indices_of_batch(module.graph, variables)
        nodes = [each.node for each in self._indices]
        self._program = _of_nodes(module, nodes)
        needed = _needed_by(nodes)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._free = [n for n in range(variables, len(inputs)) if placeholders[n] not in needed]

    def with_value(self, inputs: list[Any], value: float) -> list[Any]:
        """Return inputs with a value in the first row of the floats of the batch.

        Those from which an index is computed stay as they are.
        """
        given = list(inputs)
        for number in self._free:
            if given[number].ndim and given[number].is_floating_point():
                given[number] = given[number].clone()
                given[number][:1] = value
        return given

    def admits(self, inputs: list[Any]) -> bool:
        """Return whether the program may run on these inputs."""
        if any(each.stride() != was for each, was in zip(inputs, self._strides, strict=True)):
            return False
        values = self._program(*inputs) if self._indices else ()
        return all(map(_is_within, values, self._indices))


def _is_within(value: torch.Tensor, index: _Index) -> bool:
    if index.skipped is not None:
        value = value[value != index.skipped]
    if not value.numel():
        return True
    least, greatest = value.aminmax()
    return bool(least >= index.least) and bool(greatest < index.end)


def refusal(module: GraphModule) -> str | None:
    """Return why a graph is not to be compiled, `None` if it may be."""
    for node in module.graph.nodes:
        if node.target in _DIVISIONS and _is_integer(node) and _may_be_zero(module, node.args[1]):
            return "it divides integers by a tensor, and a compiled program ends at a zero"
    return None


_DIVISIONS = {
    aten.div.Tensor_mode,
    aten.floor_divide.default,
    aten.fmod.Tensor,
    aten.remainder.Tensor,
    aten.remainder.Scalar_Tensor,
}


def _is_integer(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return True  # not known
    return value.device.type == "cpu" and not value.is_floating_point()


def _may_be_zero(module: GraphModule, divisor: Any) -> bool:
    if not isinstance(divisor, Node):
        return False
    if divisor.op == "get_attr":
        return not bool(getattr(module, str(divisor.target)).all())
    return not (divisor.target is aten.full.default and divisor.args[1] != 0)


def _indices_of_batch(graph: Graph, variables: int) -> list[_Index]:
    """Return the indices on CPUs that are computed from the batch, and from no variable."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    known = set(inputs[variables:])
    for node in graph.nodes:
        is_computed = node.op == "call_function" and not (is_draw(node) or is_exchange(node))
        if node.op == "get_attr" or (is_computed and known.issuperset(node.all_input_nodes)):
            known.add(node)
    found = (index for node in graph.nodes for index in _indices_in(node))
    return list(dict.fromkeys(index for index in found if index.node in known))


def _indices_in(node: Node) -> Iterator[_Index]:
    """Yield the indices that an operation takes, as far as their bounds are known."""
    shape = _shape(node.args[0]) if node.args else None
    if shape is None:
        return
    if node.target is aten.embedding.default:
        yield _Index(node.args[1], 0, shape[0])
    elif node.target in (aten.index.Tensor, aten.index_put.default):
        for size, index in zip(shape, node.args[1], strict=False):
            if _is_index(index):
                yield _Index(index, -size, size)
    elif node.target in _ALONG_DIM and shape:
        size = shape[node.args[1]]
        yield _Index(node.args[2], 0, size)
    elif node.target is aten.nll_loss_forward.default:
        yield _Index(node.args[1], 0, shape[-1], node.args[4])


_ALONG_DIM = {
    aten.gather.default,
    aten.index_add.default,
    aten.index_select.default,
    aten.scatter.reduce,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
}


def _shape(value: Any) -> Any:
    """Return the shape of a tensor on a CPU, `None` if that is not known, or on another device."""
    meta = value.meta.get("val") if isinstance(value, Node) else None
    return meta.shape if isinstance(meta, torch.Tensor) and meta.device.type == "cpu" else None


def _is_index(value: Any) -> bool:
    meta = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(meta, torch.Tensor) and meta.dtype is not torch.bool


def _needed_by(nodes: list[Node]) -> set[Node]:
    """Return these nodes, and all from which they are computed."""
    needed, todo = set(nodes), list(nodes)
    while todo:
        more = [each for each in todo.pop().all_input_nodes if each not in needed]
        needed.update(more)
        todo += more
    return needed


def _of_nodes(module: GraphModule, nodes: list[Node]) -> GraphModule:
    """Return a graph of the same inputs that gives the values of some nodes."""
    made, copies, needed = Graph(), dict[Node, Node](), _needed_by(nodes)
    for node in module.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = made.node_copy(node, copies.__getitem__)
    made.output(tuple(copies[node] for node in nodes))
    return GraphModule(module, made)
