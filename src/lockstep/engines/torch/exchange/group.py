"""Processes as ranks: sums, broadcasts and gathers of tensors."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lockstep.core.rank_waits import (
    BROADCAST,
    COMPARE,
    GATHER,
    NOTHING,
    RESULTS,
    SUM,
    Waits,
)
from lockstep.engines.torch.exchange.accelerators import (
    exchanges_by_nccl,
    is_gpu,
    limit_memory,
    wait_for,
)
from lockstep.engines.torch.exchange.placement import flattened
from lockstep.engines.torch.torch_compat import next_operation_number
from lockstep.errors import UnsupportedModel

HOST = "127.0.0.1"
BUCKET = 25 * 2**20
"""Bytes of tensors that one collective takes, at most, but for a single larger tensor."""

_LONGEST_STEP = timedelta(hours=24)


_FEW = 64
"""Bytes of tensors that wait for the next sum, at most."""


class PeerLost(Exception):
    """Another rank of the group has ended, or its connection has."""


class _Sum:
    """A sum of flat tensors: its exchange and its results, once it has been sent."""

    work: Any = None
    size = 0

    def __init__(self, parts: list[Any]) -> None:
        self.parts = self.sums = parts


class RankGroup:
    """The ranks of one training.

    It is no default group of `torch.distributed`, so that nothing else in the process sees
    or uses it.

    Tensors of another device are copied to that of the rank and back.

    Args:
        store: The store where the ranks meet.
        rank: The number of this process.
        size: The number of processes.
        device: The PyTorch device of this process: NCCL connects GPUs, gloo connects CPUs, and
            shares of a GPU that has no NCCL.
        most: How long a rank waits for the others. Gloo notices the end of a process at once.
        local: Whether all processes are on this host.

    Attributes:
        backward_order: Keeps the order of backward passes the same on all ranks, if these are GPUs.
        compares: Whether every rank says what it is about to exchange: gloo ends the process where
            two ranks exchange tensors of other sizes.
        waits: Where a rank of a pool notes what it waits for; `None` under a launcher, whose
            exchanges end after a while.
    """

    waits: Waits | None = None

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        *,
        most: timedelta = _LONGEST_STEP,
        local: bool = True,
    ) -> None:
        self._by_nccl = exchanges_by_nccl(device)
        connect = _nccl if self._by_nccl else partial(_gloo, local=local)
        self.compares = False
        self._backend = self._waited(lambda: connect(store, rank, size, most))
        self._device = device if self._by_nccl else torch.device("cpu")
        self._aborted = False
        self.backward_order = BackwardOrder(device) if is_gpu(device) else None
        limit_memory(device)
        self._waiting: list[_Sum] = []
        self.rank = rank
        self.size = size

    def abort(self) -> None:
        """End what this rank waits for, from another thread: a rank has been lost."""
        self._aborted = True
        self._backend.abort()

    def check(self) -> None:
        """Return when all sums and gathers so far have arrived.

        A call to NCCL returns before its result is there, and an aborted one leaves any values.

        Raises:
            PeerLost: If a rank has been lost.
        """
        if self._by_nccl:
            self._waited(partial(wait_for, self._device), RESULTS)
        if self._aborted:
            raise PeerLost("the group was aborted")

    def sum(self, tensor: Any) -> Any:
        """Return the sum of a tensor over all ranks, which is the same on every rank."""
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        return self.start_sum([copy])()[0]

    def start_sum(self, tensors: Sequence[Any]) -> Callable[[], list[Any]]:
        """Begin to sum tensors of one type over all ranks.

        A few numbers, such as a loss, travel with the next sum of their type.

        Returns:
            A function that waits for the sums and returns them. A single tensor is overwritten.
        """
        parts = [tensor.detach().reshape(-1).to(self._device) for tensor in tensors]
        own, size = _Sum(parts), sum(part.nbytes for part in parts)
        alone = size > BUCKET  # its copy would be large
        if self._waiting and (alone or self._waiting[0].parts[0].dtype != parts[0].dtype):
            self._send_sums()
        self._waiting.append(own)
        if size > _FEW:
            self._send_sums()

        def finish() -> list[Any]:
            if own.work is None:
                self._send_sums()
            self._waited(own.work.wait, SUM, own.size)
            return [
                total.view(tensor.shape).to(tensor.device)
                for total, tensor in zip(own.sums, tensors, strict=True)
            ]

        return finish

    def _send_sums(self) -> None:
        """Begin to sum what waits, in one exchange."""
        waiting, self._waiting = self._waiting, []
        parts = [part for each in waiting for part in each.parts]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._compare("sum", flat)
        work = self._waited(lambda: self._backend.allreduce([flat]))
        sums = iter(flat.split([len(part) for part in parts]))
        for each in waiting:
            each.work, each.sums = work, [next(sums) for _ in each.parts]
            each.size = flat.nbytes

    def sum_of_part(self, flat: Any) -> Any:
        """Return this rank's part of the sum of a flat tensor, which is overwritten.

        Its size is a multiple of the number of ranks.
        """
        size = len(flat) // self.size
        if self._by_nccl:
            part = flat.new_empty(size)
            self._compare("sum", flat)
            run = partial(self._backend._reduce_scatter_base, part, flat)
            self._waited(lambda: run().wait(), SUM, flat.nbytes)
            return part
        (total,) = self.start_sum([flat])()  # gloo's own takes several times as long
        return total[self.rank * size :][:size].clone()

    def broadcast_in_place(self, tensors: Sequence[Any]) -> None:
        """Replace each tensor by that of rank 0."""
        for bucket in buckets_of(tensors):
            parts = [_bytes(tensor).to(self._device) for tensor in bucket]
            flat = parts[0] if len(parts) == 1 else torch.cat(parts)
            self._waited(partial(self._broadcast, flat), BROADCAST, flat.nbytes)
            if self.rank:
                _copy_out_bytes(flat, bucket)

    def _compare(self, what: str, tensor: Any) -> None:
        """Raise on every rank if another one is about to exchange something else."""
        if not self.compares:
            return
        names = sorted(("gather", "sum"))
        mine = torch.tensor([names.index(what), tensor.nbytes], device=self._device)
        every = mine.new_empty(2 * self.size)
        self._waited(lambda: self._backend._allgather_base(every, mine).wait(), COMPARE)
        found = every.view(-1, 2).tolist()
        self.check()  # an aborted exchange leaves any values
        first, *others = [(names[kind], size) for kind, size in found]
        for rank, other in enumerate(others, 1):
            if other != first:
                raise UnsupportedModel(
                    f"The first device is about to {first[0]} {first[1]} bytes, and replica {rank} "
                    f"to {other[0]} {other[1]}: they do not run the same code.\n{OTHER_CODE}"
                )

    def _broadcast(self, flat: Any) -> None:
        self._backend.broadcast(flat, 0).wait()

    def _waited(self, call: Callable[[], Any], what: int = NOTHING, size: int = 0) -> Any:
        try:
            if self.waits is None or what == NOTHING:
                return call()
            with self.waits.waiting(what, size):
                return call()
        except RuntimeError as error:
            raise PeerLost(str(error)) from error

    def gather(self, rows: Any, counts: Sequence[int]) -> Any:
        """Return the rows of all ranks, in the order of the ranks.

        Args:
            rows: The rows of this rank. They are of one type and shape on every rank.
            counts: The number of rows of each rank.
        """
        most = max(counts)
        own = rows
        if len(rows) < most:
            own = rows.new_zeros((most, *rows.shape[1:]))
            own[: len(rows)] = rows
        sent = _bytes(own).to(self._device)
        # No view: the user's code may write into it.
        shape = (len(counts) * most, *rows.shape[1:])
        whole = torch.empty(shape, dtype=rows.dtype, device=self._device)
        received = _bytes(whole)
        self._compare("gather", sent)
        run = partial(self._backend._allgather_base, received, sent)
        self._waited(lambda: run().wait(), GATHER, received.nbytes)
        if min(counts) < most:
            parts = zip(whole.split(most), counts, strict=True)
            whole = torch.cat([part[:count] for part, count in parts])
        return whole.to(rows.device)


OTHER_CODE = (
    "A layer or step may depend on the process, the time, or state outside of the model.\n"
    "Make that state an attribute of the model, or call lockstep.release(model)."
)
"""Ends the error for ranks that exchange different things."""


class LoneRank(RankGroup):
    """The group of a single rank: it exchanges nothing."""

    def __init__(self, device: torch.device) -> None:
        self.compares = self._aborted = self._by_nccl = False
        self.backward_order = None
        self._device = device
        self.rank, self.size = 0, 1

    def start_sum(self, tensors: Sequence[Any]) -> Callable[[], list[Any]]:
        """Return a function that returns the tensors."""
        return lambda: list(tensors)

    def broadcast_in_place(self, tensors: Sequence[Any]) -> None:
        """Leave the tensors as they are."""

    def gather(self, rows: Any, counts: Sequence[int]) -> Any:
        """Return a copy of the rows: the user's code may write into it."""
        return rows.detach().clone()


def _gloo(store: Any, rank: int, size: int, most: timedelta, *, local: bool) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [_gloo_device(local)]
    options._timeout = most
    return dist.ProcessGroupGloo(store, rank, size, options)


def _gloo_device(local: bool) -> Any:
    if local:
        return dist.ProcessGroupGloo.create_device(hostname=HOST)
    # PyTorch's own variable for the network between hosts
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


def _nccl(store: Any, rank: int, size: int, most: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = most
    return dist.ProcessGroupNCCL(store, rank, size, options)


def buckets_of(tensors: Sequence[Any]) -> list[list[Any]]:
    """Return the tensors in lists of one type and limited size, in their order."""
    buckets: list[list[Any]] = []
    size = 0
    for tensor in tensors:
        size += tensor.nbytes
        if not buckets or size > BUCKET or buckets[-1][0].dtype != tensor.dtype:
            buckets.append([])
            size = tensor.nbytes
        buckets[-1].append(tensor)
    return buckets


def _bytes(tensor: Any) -> Any:
    return flattened(tensor).view(torch.uint8)


def _copy_out_bytes(flat: Any, tensors: Sequence[Any]) -> None:
    with torch.no_grad():
        parts = flat.split([tensor.nbytes for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            # A part of the bytes may not be aligned for the type; its copy is.
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


@contextmanager
def summed_gradients(group: RankGroup, parameters: Sequence[Any]) -> Iterator[None]:
    """Replace the gradients of a backward pass inside the context by their sums over all ranks.

    The gradients of the last layers come first. They are summed as soon as a bucket is full, while
    the pass goes on. All ranks sum the same buckets in the same order. A parameter that the loss
    does not reach has no gradient on any rank.

    Args:
        group: The ranks.
        parameters: The tensors, in the order of the layers.
    """
    # PyTorch takes hooks on tensors alone that have gradients.
    trained = [tensor for tensor in reversed(parameters) if tensor.requires_grad]
    buckets = buckets_of(trained)
    place = {id(tensor): number for number, bucket in enumerate(buckets) for tensor in bucket}
    missing = [len(bucket) for bucket in buckets]
    running: list[tuple[list[Any], Callable[[], list[Any]]]] = []

    def start(bucket: list[Any]) -> None:
        reached = [tensor for tensor in bucket if tensor.grad is not None]
        running.extend(
            (part, group.start_sum([tensor.grad for tensor in part]))
            for part in buckets_of(reached)
        )

    started = 0

    def arrived(tensor: Any) -> None:
        nonlocal started
        missing[place[id(tensor)]] -= 1
        while started < len(buckets) and not missing[started]:
            start(buckets[started])
            started += 1

    # A single bucket is full at the end of the pass, and needs no hooks.
    hooked = trained if len(buckets) > 1 else []
    hooks = [tensor.register_post_accumulate_grad_hook(arrived) for tensor in hooked]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for bucket in buckets[started:]:
        start(bucket)
    for reached, finish in running:
        for tensor, total in zip(reached, finish(), strict=True):
            tensor.grad = total


_LEAST = 2**12
"""The number from which a step makes operations. Until the first exchange in the first backward
pass that makes some, these have lower numbers."""

_ROOM = 2**15
"""Operations that the thread of a step may make before the numbers of gradients are raised again.
Making so many takes 0.1 s."""


class BackwardOrder:
    """Keeps the numbers of gradients above those of other operations, on one device.

    The order of a backward pass through gradients has to be the same in every process. PyTorch runs
    the operations of a graph in the reverse order of their numbers. A thread numbers what it makes
    by itself, from 0. On GPUs the thread of the backward pass makes the operations of a gradient
    (`create_graph=True`), and that of the step all others. The first process has made more of these
    than its workers: the loop and the callbacks are there. So processes could exchange values in
    different orders. Here each process lets the numbers of gradients begin above all others.

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
