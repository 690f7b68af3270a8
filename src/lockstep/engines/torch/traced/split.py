"""Splits the operations of a traced step by rows: a tensor is that of the global batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lockstep.engines.torch.torch_compat import (
    TorchDispatchMode,
    attention_back_on_cpu,
    attention_on_cpu,
    forget_group,
    mesh_without_group,
    name_group,
    sharding_rules,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
)

aten = torch.ops.aten
GROUP = "lockstep"
"""What the exchanges in a graph call their group; `graph.py` gives them that of the ranks."""

_EVERYWHERE, _BY_ROWS, _SUMMANDS = (Replicate(),), (Shard(0),), (Partial(),)


class Mesh:
    """The ranks, as `DTensor` sees them.

    A trace exchanges nothing, so that the mesh needs no group: it has the name of one alone, and
    `torch.distributed` stays as it is, without a default group.

    Args:
        rank: The number of this rank.
        size: The number of ranks.
        device: The kind of its device, such as `"cpu"`.
    """

    def __init__(self, rank: int, size: int, device: str) -> None:
        self.rank, self.size = rank, size
        self._mesh, self._group = mesh_without_group(rank, size, device, GROUP)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Let PyTorch find the size of the group by its name inside the context."""
        name_group(GROUP, self._group)
        try:
            yield
        finally:
            forget_group(GROUP)

    def everywhere(self, value: Any) -> Any:
        """Return a tensor that every rank has whole."""
        return DTensor.from_local(value, self._mesh, _EVERYWHERE, run_check=False)

    def summands(self, value: Any) -> Any:
        """Return the sum of the tensors of all ranks, which nobody has computed yet."""
        return DTensor.from_local(value, self._mesh, _SUMMANDS, run_check=False)

    def rows(self, own: Any, rows: int) -> Any:
        """Return a tensor of the global batch, given the rows of this rank."""
        shape = (rows, *own.shape[1:])
        stride = own.stride() if own.ndim else ()
        return DTensor.from_local(
            own, self._mesh, _BY_ROWS, run_check=False, shape=torch.Size(shape), stride=stride
        )

    def whole(self, value: Any) -> Any:
        """Return the tensor itself, whatever each rank has of it."""
        if not isinstance(value, DTensor):
            return value
        return value.redistribute(self._mesh, _EVERYWHERE).to_local()

    def summed(self, gradients: Sequence[Any]) -> list[Any]:
        """Return gradients that every rank has, after one exchange for each type."""
        found: list[Any] = list(gradients)
        waiting: dict[torch.dtype, list[int]] = {}
        for number, gradient in enumerate(gradients):
            if isinstance(gradient, DTensor) and _is_sum(gradient):
                waiting.setdefault(gradient.dtype, []).append(number)
        for numbers in waiting.values():
            flat = torch.cat([gradients[n].to_local().reshape(-1) for n in numbers])
            total = self.whole(self.summands(flat))
            sizes = [gradients[n].numel() for n in numbers]
            for number, part in zip(numbers, total.split(sizes), strict=True):
                found[number] = part.view(gradients[number].shape)
        return [self.everywhere(self.whole(each)) for each in found]


def own_rows(whole: Any, rank: int, size: int) -> Any:
    """Return the rows of a rank, as `DTensor` divides them: the first ranks have more."""
    parts = torch.chunk(whole, size)
    return parts[rank] if rank < len(parts) else whole[:0]


def _is_sum(value: Any) -> bool:
    (placement,) = value.placements
    return bool(placement.is_partial()) and placement.reduce_op == "sum"


class SplitOperations(TorchDispatchMode):  # type: ignore[misc]
    """Runs operations on tensors of the global batch as `DTensor` splits them, or whole.

    What `DTensor` has no rule for, or refuses, runs on the rows of all ranks: exact, and dearer.
    So do random draws, which are those of one device.

    Args:
        mesh: The ranks.

    Attributes:
        whole: The names of the operations that ran on all rows.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh
        self.whole: set[str] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        leaves, structure = tree_flatten((arguments, options))
        split = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        if not split:
            return operation(*arguments, **options)
        if any(map(_is_partial, split)) and not _stays_partial(operation, split):
            leaves = [self._summed(leaf) for leaf in leaves]
            arguments, options = tree_unflatten(leaves, structure)
        if operation in _RULES and not _drops(operation, arguments):
            return self._by_rule(operation, arguments, options)
        if torch.Tag.nondeterministic_seeded in operation.tags:
            if operation._schema.is_mutable and len(split) == 1:
                return self._filled(operation, *arguments, **options)
            return self._on_all_rows(operation, leaves, structure)
        other = _INSTEAD.get(operation)
        if other is not None:
            return other(*arguments, **options)
        if operation not in sharding_rules() and operation not in _HANDLED:
            made = operation.decompose(*arguments, **options)
            if made is not NotImplemented:
                return made
            return self._on_all_rows(operation, leaves, structure)
        try:
            return operation(*arguments, **options)
        except RuntimeError as error:
            if not _is_refusal(error):
                raise
            return self._on_all_rows(operation, leaves, structure)

    def _summed(self, leaf: Any) -> Any:
        is_partial = isinstance(leaf, DTensor) and _is_partial(leaf)
        return self._mesh.everywhere(self._mesh.whole(leaf)) if is_partial else leaf

    def _on_all_rows(self, operation: Any, leaves: list[Any], structure: Any) -> Any:
        """Run an operation on whole tensors; a part of a result that it writes into is kept."""
        self.whole.add(str(operation))
        whole = [self._mesh.whole(leaf) for leaf in leaves]
        arguments, options = tree_unflatten(whole, structure)
        found = operation(*arguments, **options)
        if operation._schema.is_mutable:
            for before, after in zip(leaves, whole, strict=True):
                if isinstance(before, DTensor):
                    again = self._mesh.everywhere(after).redistribute(placements=before.placements)
                    before.to_local().copy_(again.to_local())
        before_of = {id(after): before for before, after in zip(leaves, whole, strict=True)}

        def result(each: Any) -> Any:
            before = before_of.get(id(each))
            return self._mesh.everywhere(each) if before is None else before

        return tree_map_only(torch.Tensor, result, found)

    def _filled(self, operation: Any, tensor: Any, *numbers: Any, **options: Any) -> Any:
        """Fill a tensor with the random numbers of one device, in the order of its memory."""
        whole = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        operation(whole, *numbers, **options)
        own = self._mesh.everywhere(whole).redistribute(placements=tensor.placements)
        tensor.to_local().copy_(own.to_local())
        return tensor

    def _by_rule(self, operation: Any, arguments: Any, options: Any) -> Any:
        """Run an operation on what a rank has of each tensor, by a rule of `_RULES`."""
        taken, given = _RULES[operation]
        rows = len(arguments[0])

        def own(leaf: Any, kind: str) -> Any:
            if not isinstance(leaf, DTensor):
                leaf = self._mesh.everywhere(leaf)
            placements = _BY_ROWS if kind == "r" else _EVERYWHERE
            return leaf.redistribute(placements=placements).to_local()

        def kind_of(leaf: Any, place: int) -> str:
            known = taken[place : place + 1]
            return known or ("r" if leaf.ndim and len(leaf) == rows else "a")

        mine = [
            own(leaf, kind_of(leaf, place)) if isinstance(leaf, torch.Tensor) else leaf
            for place, leaf in enumerate(arguments)
        ]
        others = {
            name: own(leaf, kind_of(leaf, len(taken))) if isinstance(leaf, torch.Tensor) else leaf
            for name, leaf in options.items()
        }
        found = operation(*mine, **others)
        make = {"r": lambda each: self._mesh.rows(each, rows), "s": self._mesh.summands}
        if isinstance(found, torch.Tensor):
            return make[given](found)
        return tuple(
            make[kind](each) if isinstance(each, torch.Tensor) else each
            for kind, each in zip(given, found, strict=True)
        )


def _is_partial(value: Any) -> bool:
    return bool(value.placements[0].is_partial())


def _stays_partial(operation: Any, split: list[Any]) -> bool:
    """Return whether an operation on sums that nobody has computed gives such a sum.

    Otherwise `DTensor` might reduce the result, which has more numbers.
    """
    return operation is not aten.expand.default and all(map(_is_partial, split))


def _drops(operation: Any, arguments: Any) -> bool:
    """Return whether attention drops weights at random: then its draws are those of one device."""
    number = _DROPOUT.get(operation)
    return number is not None and len(arguments) > number and bool(arguments[number])


def _is_refusal(error: RuntimeError) -> bool:
    text = str(error)
    return "Sharding propagation failed" in text or "redistribut" in text


def _mean(tensor: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Take the mean by a sum: that of uneven rows would need all of them."""
    axes = range(tensor.ndim) if dims is None or dims == [] else dims
    count = 1
    for axis in axes:
        count *= tensor.shape[axis]
    total = aten.sum.dim_IntList(tensor, list(axes), keepdim, dtype=dtype)
    return total / count


_INSTEAD: dict[Any, Any] = {aten.mean.default: _mean, aten.mean.dim: _mean}

_RULES: dict[Any, tuple[str, str]] = {
    aten.convolution.default: ("raa", "r"),
    aten.convolution_backward.default: ("rra", "rss"),
    attention_on_cpu: ("rrr", "rr"),
    attention_back_on_cpu: ("rrrrrr", "rrr"),
    aten.max_pool2d_with_indices.default: ("r", "rr"),
    aten.max_pool2d_with_indices_backward.default: ("rr", "r"),
    aten.avg_pool2d.default: ("r", "r"),
    aten.avg_pool2d_backward.default: ("rr", "r"),
}
"""What a rank has of each tensor that an operation takes and gives: rows, all, or a summand."""

_DROPOUT = {
    attention_on_cpu: 3,
    attention_back_on_cpu: 6,
}
"""The argument that is the rate of dropout, of operations that may draw."""

_HANDLED = {
    aten.is_same_size.default,
    aten.is_pinned.default,
    aten.as_strided.default,
    aten.argmin.default,
    aten.argmax.default,
}
"""What `DTensor` runs by code of its own."""
