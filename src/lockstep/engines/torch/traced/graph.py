"""The graph of a traced step: cleaned, with few exchanges, and run on the ranks."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from lockstep.engines.torch.exchange.group import BUCKET, RankGroup
from lockstep.engines.torch.torch_compat import functional_exchanges, without_duplicates

_RUNNING: ContextVar[RankGroup] = ContextVar("lockstep_group_of_graph")


@contextmanager
def exchanging(group: RankGroup) -> Iterator[None]:
    """Let graphs inside the context exchange tensors over these ranks."""
    token = _RUNNING.set(group)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def traced(step: Callable[..., Any], inputs: list[Any]) -> GraphModule:
    """Return the graph of a function of tensors. No operation in it writes into a tensor.

    Args:
        step: The function.
        inputs: Its arguments: their values are not looked at.
    """
    first = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    first.graph.eliminate_dead_code()
    _keep_order_of_draws(first.graph)
    first.recompile()
    with torch.no_grad():
        pure = make_fx(functionalize(first), tracing_mode="fake", _allow_non_fake_inputs=True)(
            *inputs
        )
    pure.graph.eliminate_dead_code()
    return pure


def cleaned(module: GraphModule, rank: int, size: int) -> GraphModule:
    """Compute nothing twice, and let sums that can travel together do so.

    Args:
        module: The graph of a rank.
        rank: Its number.
        size: The number of ranks.
    """
    _free_constants(module.graph)
    graph, depth = _by_depth(without_duplicates(module.graph))
    _merge_sums(graph, depth)
    _bind(graph, rank, size)
    _keep_order_of_exchanges(graph)
    graph.eliminate_dead_code()
    graph.lint()
    return GraphModule(module, graph)


def exchanges(graph: Graph) -> list[str]:
    """Return what the ranks exchange in a run, in its order: all of them have to do the same."""
    return [
        f"{node.target}{tuple(node.args[0].meta['val'].shape)}{node.args[0].meta['val'].dtype}"
        for node in graph.nodes
        if is_exchange(node)
    ]


def _keep_order_of_draws(graph: Graph) -> None:
    """Let tensors be filled with random numbers in the order in which they lie in memory.

    An operation that writes into a tensor does so, and the one that makes a new tensor does not.
    """
    for node in list(graph.nodes):
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded not in tags or not node.target._schema.is_mutable:
            continue
        like, *numbers = node.args
        name = node.target._schema.name.rpartition("::")[2]
        with graph.inserting_before(node):
            new = graph.call_function(_FILLED, (like, name, list(map(float, numbers))))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        like.replace_all_uses_with(new, delete_user_cb=lambda user, own=new: user is not own)


def _fill(like: torch.Tensor, name: str, numbers: list[float]) -> torch.Tensor:
    """Return random numbers in the shape and the strides of a tensor.

    Args:
        like: The tensor.
        name: The name of the method that fills a tensor.
        numbers: Its arguments.
    """
    made = torch.empty_like(like)
    getattr(made, name)(*numbers)
    return made


def _filled(like: torch.Tensor, name: str, numbers: list[float]) -> torch.Tensor:
    return torch.empty_like(like)


torch.library.custom_op(
    "lockstep::filled", _fill, mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
).register_fake(_filled)
_FILLED = torch.ops.lockstep.filled.default


def draws(graph: Graph) -> bool:
    """Return whether a run draws random numbers of PyTorch."""
    return any(map(is_draw, graph.nodes))


# ------------------------------------------------------------------------- fewer exchanges


def _free_constants(graph: Graph) -> None:
    """Let tensors that have the shape alone of another one not wait for its value."""
    fills = {aten.ones_like.default: 1, aten.zeros_like.default: 0}
    for node in list(graph.nodes):
        fill = fills.get(node.target)
        if node.target is aten.full_like.default:
            fill = node.args[1]
        if fill is None or not isinstance(fill, int | float):
            continue
        value = node.meta["val"]
        options = {"dtype": value.dtype, "device": value.device}
        if not value.is_contiguous():
            continue
        with graph.inserting_before(node):
            new = graph.call_function(aten.full.default, (list(value.shape), fill), options)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _by_depth(graph: Graph) -> tuple[Graph, dict[Node, int]]:
    """Return a graph that computes all it can before each exchange, and the depth of its nodes.

    The depth is the number of exchanges that a node needs. Random numbers are drawn in the order
    of the step.
    """
    depth: dict[Node, int] = {}
    drawn = 0
    for node in graph.nodes:
        depth[node] = max((depth[each] for each in node.all_input_nodes), default=0)
        if node.target is _WAIT:
            depth[node] += 1
        elif is_draw(node):
            depth[node] = drawn = max(drawn, depth[node])
    ends = {"placeholder": -1, "output": len(depth)}
    order = sorted(graph.nodes, key=lambda node: ends.get(node.op, depth[node]))
    new = Graph()
    copies: dict[Node, Node] = {}
    for node in order:
        copies[node] = new.node_copy(node, lambda each: copies[each])
    return new, {copies[node]: number for node, number in depth.items()}


def _merge_sums(graph: Graph, depth: dict[Node, int]) -> None:
    """Let sums of one type and depth be one exchange."""
    alike: dict[Any, list[list[Node]]] = {}
    for node in graph.nodes:
        if node.target is not _REDUCE or node.args[1] != "sum":
            continue
        batches = alike.setdefault((depth[node], node.meta["val"].dtype), [[]])
        if batches[-1] and sum(map(_bytes, [*batches[-1], node])) > BUCKET:
            batches.append([])
        batches[-1].append(node)
    for batches in alike.values():
        for batch in batches:
            if len(batch) > 1:
                _merge(graph, batch)


def _bytes(node: Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())


def _merge(graph: Graph, sums: list[Node]) -> None:
    """Replace sums by one of their flat parts, where the last of them stands."""
    last, values = sums[-1], [node.meta["val"] for node in sums]
    sizes = [value.numel() for value in values]

    def add(target: Any, *arguments: Any, value: Any = None) -> Node:
        node = graph.call_function(target, arguments)
        node.meta["val"] = value
        return node

    with graph.inserting_before(last):
        flat = [add(aten.reshape.default, node.args[0], [-1]) for node in sums]
        whole = values[0].new_empty(sum(sizes))
        joined = add(aten.cat.default, flat, value=whole)
        done = add(_WAIT, add(_REDUCE, joined, *last.args[1:], value=whole), value=whole)
        pieces = add(aten.split_with_sizes.default, done, sizes)
        outputs = [
            add(aten.reshape.default, add(operator.getitem, pieces, number), list(value.shape))
            for number, value in enumerate(values)
        ]
    for node, output in zip(sums, outputs, strict=True):
        for wait in list(node.users):
            wait.replace_all_uses_with(output)
            graph.erase_node(wait)
        graph.erase_node(node)


def is_draw(node: Node) -> bool:
    """Return whether a node draws from PyTorch's own random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and not _is_fixed(node)


def is_exchange(node: Node) -> bool:
    """Return whether the ranks exchange something in a node."""
    return node.target in (_SUM, _GATHER)


def _is_fixed(node: Node) -> bool:
    """Return whether an operation that may draw does not: attention without dropout."""
    names = [each.name for each in node.target._schema.arguments]
    if "dropout_p" not in names or "attention" not in str(node.target):
        return False
    place = names.index("dropout_p")
    given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return not given


# ------------------------------------------------------------------------- exchanges of the ranks


def _sum_of_ranks(tensor: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum of a tensor over the ranks.

    Args:
        tensor: The tensor of this rank.
        before: What the exchange before it has given.
    """
    return _RUNNING.get().sum(tensor)


def _like(tensor: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _gather_ranks(
    tensor: torch.Tensor, size: int, before: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the rows of all ranks, of which each has as many.

    Args:
        tensor: The rows of this rank.
        size: The number of ranks.
        before: What the exchange before it has given.
    """
    return _RUNNING.get().gather(tensor, (len(tensor),) * size)


def _rows(tensor: torch.Tensor, size: int, before: torch.Tensor | None = None) -> torch.Tensor:
    return tensor.new_empty((len(tensor) * size, *tensor.shape[1:]))


torch.library.custom_op("lockstep::sum_of_ranks", _sum_of_ranks, mutates_args=()).register_fake(
    _like
)
torch.library.custom_op("lockstep::gather_ranks", _gather_ranks, mutates_args=()).register_fake(
    _rows
)

aten = torch.ops.aten
_SUM, _GATHER = torch.ops.lockstep.sum_of_ranks.default, torch.ops.lockstep.gather_ranks.default
_REDUCE = functional_exchanges.all_reduce.default
_WAIT = functional_exchanges.wait_tensor.default
_ALL_GATHER = functional_exchanges.all_gather_into_tensor.default
_REDUCE_SCATTER = functional_exchanges.reduce_scatter_tensor.default


def _bind(graph: Graph, rank: int, size: int) -> None:
    """Let the exchanges that `DTensor` has asked for be those of the ranks."""
    for node in list(graph.nodes):
        if node.target is _WAIT:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in list(graph.nodes):
        make = _EXCHANGES.get(node.target)
        if make is None:
            continue
        with graph.inserting_before(node):
            node.replace_all_uses_with(make(graph, node, rank, size))
        graph.erase_node(node)


def _keep_order_of_exchanges(graph: Graph) -> None:
    """Let each exchange need the one before it: a compiler keeps the order that all ranks have."""
    before: tuple[Node, ...] = ()
    for node in graph.nodes:
        if is_exchange(node):
            node.args = (*node.args, *before)
            before = (node,)


def _gathered(graph: Graph, tensor: Any, size: int, value: Any) -> Node:
    node = graph.call_function(_GATHER, (tensor, size))
    node.meta["val"] = value
    return node


def _reduced(graph: Graph, node: Node, rank: int, size: int) -> Node:
    tensor, how = node.args[:2]
    value = node.meta["val"]
    if how in ("sum", "avg"):
        total = graph.call_function(_SUM, (tensor,))
        total.meta["val"] = value
        return total if how == "sum" else graph.call_function(aten.div.Scalar, (total, size))
    first = graph.call_function(aten.unsqueeze.default, (tensor, 0))
    first.meta["val"] = value[None]
    every = _gathered(graph, first, size, value[None].expand(size, *value.shape))
    return graph.call_function(_OF_ALL[how], (every, [0] if how in ("max", "min") else 0))


_OF_ALL = {
    "max": aten.amax.default,
    "min": aten.amin.default,
    "product": aten.prod.dim_int,
}


def _scattered(graph: Graph, node: Node, rank: int, size: int) -> Node:
    total = graph.call_function(_SUM, (node.args[0],))
    total.meta["val"] = node.args[0].meta["val"]
    rows = len(node.meta["val"])
    own = graph.call_function(aten.slice.Tensor, (total, 0, rank * rows, (rank + 1) * rows))
    scale = node.args[1] == "avg"
    return graph.call_function(aten.div.Scalar, (own, size)) if scale else own


def _all_gathered(graph: Graph, node: Node, rank: int, size: int) -> Node:
    return _gathered(graph, node.args[0], size, node.meta["val"])


_EXCHANGES: dict[Any, Callable[[Graph, Node, int, int], Node]] = {
    _REDUCE: _reduced,
    _ALL_GATHER: _all_gathered,
    _REDUCE_SCATTER: _scattered,
}
