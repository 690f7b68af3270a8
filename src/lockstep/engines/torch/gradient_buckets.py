"""Sums the gradients of a backward pass over all ranks while it runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.engines.torch.group import Group, buckets_of


@contextmanager
def summed_gradients(group: Group, parameters: Sequence[Any]) -> Iterator[None]:
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
