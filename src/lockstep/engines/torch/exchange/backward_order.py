"""The order of a backward pass through gradients, which has to be the same in every process.

PyTorch runs the operations of a graph in the reverse order of their numbers. A thread numbers what
it makes by itself, from 0. On GPUs the thread of the backward pass makes the operations of a
gradient (`create_graph=True`), and that of the step all others. The first process has made more of
these than its workers: the loop and the callbacks are there. So processes could exchange values
in different orders. Here each process lets the numbers of gradients begin above all others.
"""

from typing import Any

import torch

from lockstep.engines.torch.torch_compat import next_operation_number

_LEAST = 2**12
"""The number from which a step makes operations. Until the first exchange in the first backward
pass that makes some, these have lower numbers."""

_ROOM = 2**15
"""Operations that the thread of a step may make before the numbers of gradients are raised again.
Making so many takes 0.1 s."""


class BackwardOrder:
    """Keeps the numbers of gradients above those of other operations, on one device.

    Args:
        device: The device of this process: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_step = 0
        self._reached: int | None = None

    def begin_step(self) -> None:
        """Note that a step begins. Its thread calls this."""
        _raise_to(_LEAST)
        self._of_step = _next_number()
        if self._reached is not None and self._reached < self._of_step + _ROOM:
            start = torch.zeros((), device=self._device, requires_grad=True)
            _InBackward.apply(start, self).backward()

    def in_backward(self) -> None:
        """Raise the numbers, if a backward pass makes operations. Its thread calls this."""
        if torch.is_grad_enabled():
            _raise_to(self._of_step + _ROOM, by=_ROOM)
            self._reached = _next_number()


class _InBackward(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, start: Any, order: BackwardOrder) -> Any:
        ctx.order = order
        return start.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        with torch.enable_grad():
            ctx.order.in_backward()
        return gradient, None


def _raise_to(number: int, *, by: int = 0) -> None:
    """Let this thread go on from a number, or from one further on, if it is not there yet."""
    missing = number - _next_number()
    if missing > 0:
        with torch.inference_mode(mode=False), torch.enable_grad():
            made = [torch.zeros((), requires_grad=True)] * 1024
            for _ in range(-(-(missing + by) // len(made))):
                torch.atleast_1d(made)  # an operation for each


def _next_number() -> int:
    """Return the number of the next operation that this thread makes."""
    # torch/csrc/autograd/init.cpp; torch/fx/traceback.py asks so, too.
    return int(next_operation_number())
