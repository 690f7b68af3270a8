"""Gradients are summed in buckets, each once, while the backward pass runs."""

import numpy as np
import torch
import torch.distributed as dist

from lockstep.engines.torch.exchange import group
from lockstep.engines.torch.exchange.group import RankGroup, summed_gradients


class TwoAlike:
    """Stands for two ranks with the same gradients."""

    def __init__(self):
        self.started = []

    def start_sum(self, tensors):
        self.started.append(len(tensors))

        return lambda: [2 * tensor for tensor in tensors]


def run(bucket_bytes, monkeypatch):
    """A network with a weight used twice, one that the loss does not reach, and a frozen one."""
    monkeypatch.setattr(group, "BUCKET", bucket_bytes)
    torch.manual_seed(0)
    twice, last, unused, frozen = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(4))
    frozen.requires_grad_(False)
    parameters = [twice, last, unused, frozen]

    def loss():
        return (torch.ones(2, 4) @ twice @ twice @ frozen @ last).square().sum()

    loss().backward()
    expected = [None if each.grad is None else 2 * each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    both, seen = TwoAlike(), []
    # The node of the first weight runs at the end of the backward pass.
    with summed_gradients(both, parameters):
        twice.register_post_accumulate_grad_hook(lambda _: seen.append(list(both.started)))
        loss().backward()
    for each, sum_of_both in zip(parameters, expected, strict=True):
        assert (each.grad is None) == (sum_of_both is None)
        if each.grad is not None:
            np.testing.assert_array_equal(each.grad, sum_of_both)
    assert len(twice._post_accumulate_grad_hooks) == 1, "the hooks of the pass are gone"
    return both.started, seen


def test_weights_of_their_own_buckets_are_summed_once_each(monkeypatch):
    started, _ = run(64, monkeypatch)
    assert started == [1, 1]


def test_all_gradients_of_one_bucket_are_summed_as_one(monkeypatch):
    started, seen = run(2**20, monkeypatch)
    assert started == [2]
    assert seen == [[]]


def test_the_last_layers_come_first(monkeypatch):
    first, last = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    monkeypatch.setattr(group, "BUCKET", 64)
    both, seen = TwoAlike(), []
    with summed_gradients(both, [first, last]):
        first.register_hook(lambda _: seen.append(list(both.started)))
        (torch.ones(2, 4) @ first @ last).sum().backward()
    assert seen == [[1]], "the last layer was being summed when the first had its gradient"
    assert both.started == [1, 1]


def test_a_few_numbers_travel_with_the_next_sum_of_their_type():
    alone = RankGroup(dist.HashStore(), 0, 1, torch.device("cpu"))
    sent, send = [], alone._backend.allreduce

    def counted(tensors):
        sent.append([(tensor.dtype, len(tensor)) for tensor in tensors])
        return send(tensors)

    class Counting:
        allreduce = staticmethod(counted)

    alone._backend = Counting()
    short, long = torch.tensor(3.0), torch.arange(20.0).reshape(4, 5)
    finish_short, finish_long = alone.start_sum([short.clone()]), alone.start_sum([long, long + 1])
    for total, value in zip(
        [*finish_short(), *finish_long()], [short, long, long + 1], strict=True
    ):
        np.testing.assert_array_equal(total, value)
    assert sent == [[(torch.float32, 41)]]
    # One of another type is no part of it, and one that nothing follows goes alone.
    finish_short, finish_long = alone.start_sum([short.clone()]), alone.start_sum([long.double()])
    assert alone.sum(short.half()) == short
    assert finish_long()[0].dtype == torch.float64
    assert finish_short()[0] == short
    kinds = [(torch.float32, 1), (torch.float64, 20), (torch.float16, 1)]
    assert sent[1:] == [[each] for each in kinds]
