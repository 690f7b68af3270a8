"""What code of a step sees in a trace in place of the model's own tensors."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lockstep.engines.torch.torch_compat import add_each_in_place, multiply_each
from lockstep.engines.torch.traced.draws import SeededGenerator, draw_in_graph

LONGEST = 60.0
"""Seconds that the functions of a step may take in a trace."""


class Untraceable(Exception):
    """A step cannot be a graph; the message ends a sentence about its model."""


class TracedTensors(TorchFunctionMode):  # type: ignore[misc]
    """Lets the functions of PyTorch inside the context use other tensors than the model's own.

    `make_fx` does not trace `backward`, so it becomes `torch.autograd.grad`. Random numbers of
    Keras are drawn within the graph.

    Args:
        stand_ins: What stands for each tensor of the model, by the `id` of this one.
        trained: The tensors that take gradients, by the `id` of their variable.
        summed: Returns gradients of the global batch, given those of the rows of this rank.
        whole: Returns a tensor as every rank has it.
    """

    def __init__(
        self,
        stand_ins: dict[int, Any],
        trained: dict[int, Any],
        summed: Callable[[Sequence[Any]], list[Any]],
        whole: Callable[[Any], Any],
    ) -> None:
        super().__init__()
        self._stand_ins = stand_ins
        self._trained = trained
        self._summed = summed
        self._whole = whole
        self._deadline = time.monotonic() + LONGEST

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if time.monotonic() > self._deadline:
            raise Untraceable(f"tracing it takes more than {LONGEST:.0f} s")
        arguments, options = self._replaced(arguments), self._replaced(options or {})
        if function in _READS and type(arguments[0]) in (torch.Tensor, torch.nn.Parameter):
            raise Untraceable("Python reads a tensor that is not a Keras variable")
        if function is torch.Tensor.backward:
            return self._backward(*arguments, **options)
        if isinstance(options.get("generator"), SeededGenerator):
            return draw_in_graph(self._whole, function, arguments, options)
        special = _SPECIAL.get(function)
        if special is not None:
            return special(*arguments, **options)
        return function(*arguments, **options)

    def _replaced(self, nest: Any) -> Any:
        if isinstance(nest, torch.Tensor):
            return self._stand_ins.get(id(nest), nest)
        if type(nest) in (list, tuple):
            return type(nest)(map(self._replaced, nest))
        if type(nest) is dict:
            return {name: self._replaced(value) for name, value in nest.items()}
        return nest

    def _backward(
        self,
        loss: Any,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        wanted = list(self._trained.values()) if inputs is None else list(inputs)
        found = torch.autograd.grad(
            loss,
            wanted,
            None if gradient is None else (gradient,),
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
        reached = [number for number, each in enumerate(found) if each is not None]
        with torch.no_grad():
            summed = self._summed([found[number] for number in reached])
        for number, total in zip(reached, summed, strict=True):
            before = wanted[number].grad
            wanted[number].grad = total if before is None else before + total


def _add_each(tensors: Any, others: Any, *, alpha: Any = 1) -> Any:
    """Add with a factor that is a tensor: PyTorch would read its value."""
    if isinstance(alpha, torch.Tensor):
        others, alpha = multiply_each(others, alpha), 1
    return add_each_in_place(tensors, others, alpha=alpha)


def _repeat_interleave(tensor: Any, repeats: Any, dim: Any = None, **options: Any) -> Any:
    """Repeat by a number: the length of the result would depend on a tensor of one."""
    if isinstance(repeats, torch.Tensor) and repeats.numel() == 1:
        repeats = int(repeats)
    return torch.repeat_interleave(tensor, repeats, dim, **options)


_READS = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__array__")
}
"""How Python reads the values of a tensor."""

_SPECIAL: dict[Any, Any] = {
    add_each_in_place: _add_each,
    torch.repeat_interleave: _repeat_interleave,
}
