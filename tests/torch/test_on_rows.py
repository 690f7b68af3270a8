"""Tensors of which each device has its rows: code of a step sees what it sees on one device."""

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops
from torch.utils.checkpoint import checkpoint

from lockstep.engines.torch.exchange.group import RankGroup
from lockstep.errors import UnsupportedModel
from tests.agreement import assert_equal, both


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


def gradient_of_what_two_layers_and_code_use(model, inner):
    loss = model.last(inner).square().mean() + model.more(inner).sin().sum() + inner.pow(3).sum()
    (slope,) = torch.autograd.grad(loss, inner, create_graph=True)
    return slope.square().mean() + model.last(slope).mean()


def hook_after_the_call(model, inner):
    loss = model.last(inner).square().mean() + inner.mean()
    inner.register_hook(lambda gradient: gradient / gradient.norm())
    return loss


def kept_gradient(model, inner):
    inner.retain_grad()
    loss = model.last(inner).square().mean()
    loss.backward(retain_graph=True, inputs=[inner])
    return model.last(inner + inner.grad.sign()).mean()


def written_through_a_view(model, inner):
    inner.view(-1)[3:9].mul_(2)
    loss = model.last(inner).square().mean() + inner.square().mean()
    (slope,) = torch.autograd.grad(loss, inner, retain_graph=True)
    return loss + (slope.detach() * inner).sum()


def written_without_its_graph(model, inner):
    same = inner.detach()
    same.mul_(2)
    same.numpy()[0] = 5
    return model.last(inner).square().mean() + model.last(same).mean()


def read_without_gradients_first(model, inner):
    with torch.no_grad():
        center = inner.mean(0)
    return (inner - center).square().mean() + model.last(inner - center).square().mean()


def another_shape_in_place(model, inner):
    with torch.no_grad():
        inner = model.more(inner)
        inner.unsqueeze_(0)
        inner.transpose_(1, 2)
    return (inner * inner.shape[1]).sin().mean() * len(inner.detach())


def other_data(model, inner):
    inner = model.more(inner)
    loss = model.last(inner).sin().mean()
    other = model.more(inner)
    other.data = other.data * 2
    return loss + model.last(other.detach()).square().mean() + model.last(other).mean()


def kept_gradient_after_writing(model, inner):
    inner = model.more(inner)
    inner.retain_grad()
    inner.mul_(2)
    loss = model.last(inner).square().mean()
    loss.backward(retain_graph=True, inputs=[inner])
    return model.last(inner + inner.grad.sign()).mean()


def function_of_torch(model, inner):
    doubled = Doubled.apply(inner)
    return model.last(doubled).square().mean() + doubled.mean()


def leaf(model, inner):
    inner = inner.detach()
    inner.requires_grad = True
    for power in (2, 3):
        model.last(inner).pow(power).sum().backward()
    return model.last(inner.grad).mean()


def leaf_without_its_gradient(model, inner):
    z = inner.detach().requires_grad_()
    model.last(z).square().sum().backward()
    del z.grad
    model.last(z)[0].sum().backward()
    return (z.grad * inner).sum()


def weights_that_are_replaced(model, inner):
    """By `data`, as in sharpness-aware minimization: PyTorch counts no such change."""
    kernel = model.last.weights[0].value
    before, slope = kernel.data, 0
    for _ in range(2):
        kernel.data = before + slope
        loss = model.last(inner).square().mean()
        (slope,) = torch.autograd.grad(loss, kernel, retain_graph=True)
    kernel.data = before
    return (model.last(inner) * slope.sum(0)).mean()


def in_inference_mode(model, inner):
    with torch.inference_mode():
        labels = model.last(model.more(inner))
        labels += model.last(labels.mean() * inner.float().double())
    return (model.last(inner) - labels.clone()).square().mean()


def transformed_by_torch(model, inner):
    slope = torch.func.grad(lambda x: (model.last(x) * model.last(inner)).sum())(inner)
    each = torch.func.vmap(lambda row: model.more(row[None]).pow(3).sum())(inner)
    return model.last(slope).square().mean() + each.mean()


def named_outputs(model, inner):
    named = model.pair(inner, inner.sin(), is_named=True)
    return model.last(named.one).square().mean() + named.other.std()


def one_tensor_twice(model, inner):
    return (model.pair(inner, inner) + model.pair(inner, inner.sin())).square().mean()


def with_weights_of_its_own(model, inner):
    """First-order meta-learning."""
    given, fixed = [weight.value for weight in model.last.trainable_weights], []
    for _ in range(2):
        given = [each.detach().requires_grad_() for each in given]
        loss = model.last.stateless_call(given, fixed, inner)[0].square().mean()
        slopes = torch.autograd.grad(loss, given, retain_graph=True)
        given = [each - slope for each, slope in zip(given, slopes, strict=True)]
    return model.last(inner * slopes[0].sum(1)).mean()


def recomputed(model, inner):
    return checkpoint(lambda x: x.square().sin(), inner, use_reentrant=True).mean()


CASES = (
    gradient_of_what_two_layers_and_code_use,
    hook_after_the_call,
    kept_gradient,
    written_through_a_view,
    written_without_its_graph,
    read_without_gradients_first,
    another_shape_in_place,
    other_data,
    kept_gradient_after_writing,
    function_of_torch,
    leaf,
    leaf_without_its_gradient,
    weights_that_are_replaced,
    in_inference_mode,
    transformed_by_torch,
    named_outputs,
    one_tensor_twice,
    with_weights_of_its_own,
    recomputed,
)


class Named:
    def __init__(self, one, other):
        self.one, self.other = one, other


class Paired(layers.Layer):
    """Looks whether its arguments are one tensor, and may return an object that holds tensors."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(5)
        self.dense.build((None, 5))
        self.built = True

    def call(self, one, other, is_named=False):
        inner = self.dense(one) * 2 if one is other else self.dense(one) + other
        return Named(inner, one) if is_named else inner


class Stepping(keras.Model):
    """A step that takes the loss of each case, of outputs of its own."""

    cases = CASES

    def __init__(self):
        super().__init__()
        self.first, self.last, self.more = (
            keras.Sequential([keras.Input((inputs,)), layers.Dense(units)])
            for inputs, units in ((4, 5), (5, 3), (5, 5))
        )
        self.pair = Paired()
        self.built = True
        self.kept = []

    def train_step(self, x):
        self.zero_grad()
        losses = {case.__name__: case(self, self.first(x)) for case in self.cases}
        sum(losses.values()).backward()
        self.kept = [self.first(x).detach()]
        weights = [weight for weight in self.trainable_weights if weight.value.grad is not None]
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return losses


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
@pytest.mark.parametrize("batch_size", [7, 2])
def test_code_of_a_step_does_with_rows_what_it_does_with_a_tensor(monkeypatch, batch_size):
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")  # it would let one device run the step
    found = []
    x = np.random.default_rng(0).normal(size=(2 * batch_size, 4))
    for model in both(Stepping):
        model.compile(keras.optimizers.SGD(0.01))
        history = model.fit(x, batch_size=batch_size, epochs=2, shuffle=False, verbose=0).history
        found.append((history, ops.convert_to_numpy(model.kept[0]), model.get_weights()))
    assert_equal(*found)


class Chain(Stepping):
    cases = (
        lambda model, inner: model.last(model.more(inner)).square().mean(),
        lambda model, inner: model.last(model.more(inner)).mean(),
    )


def test_a_layer_takes_the_rows_of_another_one_and_weights_are_summed_once(monkeypatch):
    """Two outputs of `last` and one that is kept are gathered; three layers have weights."""
    asked = []
    for name in ("gather", "start_sum"):
        plain = getattr(RankGroup, name)
        monkeypatch.setattr(
            RankGroup,
            name,
            lambda group, *args, name=name, plain=plain: asked.append(name) or plain(group, *args),
        )
    _, model = both(Chain)
    model.compile(keras.optimizers.SGD(0.01))
    x = np.zeros((7, 4))
    model.fit(x, batch_size=7, verbose=0)
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")  # the last step of an epoch is compared again
    asked.clear()
    model.fit(x, batch_size=7, verbose=0)
    assert (asked.count("gather"), asked.count("start_sum")) == (3, 3)


class Refilled(Stepping):
    cases = (lambda model, inner: inner.detach().set_(torch.ones_like(inner)).sum() + inner.sum(),)


def test_an_output_cannot_be_given_other_memory(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")
    _, model = both(Refilled)
    model.compile(keras.optimizers.SGD(0.01))
    with pytest.raises(UnsupportedModel, match=r"different memory by set_ in a step"):
        model.fit(np.zeros((7, 4)), batch_size=7, verbose=0)
