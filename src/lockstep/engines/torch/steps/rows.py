"""Tensors of the global batch of which each replica has its rows, and what crosses their border.

A tensor is replicated outside of the calls that replicas share, and each replica has its own rows
inside. The operations at this border are each other's derivatives: taking rows and joining them,
using a weight and summing its gradients. So gradients of gradients are right too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch

from lockstep.engines.torch.exchange.group import RankGroup, buckets_of
from lockstep.engines.torch.exchange.placement import version_of
from lockstep.engines.torch.steps.replica import Replica
from lockstep.engines.torch.torch_compat import (
    plain_torch_functions,
    temporarily_clear_interpreter_stack,
    transforms_in_force,
)
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import get_keras_mask, set_keras_mask


class _Values:
    """The values of `Rows`: those of this replica, and of all replicas once they are gathered.

    Attributes:
        replica: This replica.
        own: The rows of this replica.
        name: What they are, for an error.
        form_row: A row that is run for its form where this replica has none; see `Replica`.
        every: The rows of all replicas, into which code may write. `None` until they are gathered.
        version: The version of `every` before that.
        base: What these values are a cast of.
    """

    every: Any = None
    version = 0
    base: "_Values | None" = None

    def __init__(self, replica: Replica, own: Any, name: str) -> None:
        self.replica, self.own, self.name = replica, own, name
        self.form_row = own if len(own) else own.new_zeros((1, *own.shape[1:]))

    def gathered(self) -> Any:
        """Return the rows of all replicas, and keep them. Every replica has to call this."""
        if self.every is None:
            with outside_transforms():
                self.every = self.copied()
            self.version = self.every._version
        return self.every

    def copied(self) -> Any:
        """Return the rows of all replicas. Every replica has to call this.

        Raises:
            UnsupportedModel: If the step has ended, and nobody has gathered them before.
        """
        if self.every is not None:
            return self.every.clone()
        if self.base is not None and self.base.every is None:  # there may be other casts of it
            return self.base.gathered().to(self.own.dtype)
        if self.replica.is_over:
            raise UnsupportedModel(
                f"{self.name} is used after its step has ended, but then each device has only "
                "its own rows.\n"
                "To keep the value, convert it within the step: keras.ops.convert_to_numpy."
            )
        return self.replica.group.gather(self.own, self.replica.counts)


class Rows(torch.Tensor):  # type: ignore[misc]
    """A tensor of the global batch of which this replica has its rows.

    It has a form and a place in the gradient graph, as any tensor. Any operation but a cast gathers
    the rows of all replicas first. What only shared calls use is never gathered.
    """

    values: _Values
    _whole: Any = None
    _nodes: tuple[Any, Any] = (None, None)
    _place: Any = None

    @classmethod
    def of(cls, values: _Values) -> "Rows":
        """Return a tensor with these values, without a place in the graph."""
        own = values.own
        shape = values.replica.rows, *own.shape[1:]
        made: Rows = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=own.dtype, device=own.device
        )
        made.values = values
        return made

    @property
    def is_written(self) -> bool:
        """Whether code has written into the values of all replicas."""
        every = self.values.every
        return every is not None and (every._version != self.values.version or self._has_moved())

    @property
    def is_gathered(self) -> bool:
        """Whether code may have the values of all replicas, and may have written into them."""
        return self.values.every is not None

    def whole(self) -> Any:
        """Return the tensor of the global batch. Every replica has to call this."""
        with plain_torch_functions():
            node = self.grad_fn or self.requires_grad
        if self._whole is None or (self._nodes[0] is not node and not self._has_moved()):
            # The graph is that of the output, whatever the mode is where it is used first.
            with outside_transforms(), torch.enable_grad():
                self._whole = _Gather.apply(self)
            self._nodes, self._place = (node, self._whole.grad_fn), version_of(self._whole)[1:]
            mask = get_keras_mask(self)
            if mask is not None:
                set_keras_mask(self._whole, mask)
        return self._whole

    def _in_graph(self) -> Any:
        """Return what stands for this tensor in the graph: code may have written into it."""
        is_same = self._whole is None or (
            self._whole.grad_fn is self._nodes[1] and not self._has_moved()
        )
        return self if is_same else self._whole

    def _has_moved(self) -> bool:
        """Return whether code has given the whole tensor another shape in place, or other data."""
        return self._whole is not None and version_of(self._whole)[1:] != self._place

    def _after_writing(self) -> Any:
        """Return what stands for this tensor in the graph, after code may have written into it."""
        now = self._in_graph()
        with plain_torch_functions():
            if now is not self and self.retains_grad and now.requires_grad:
                now.retain_grad()
        return now

    def _cast(self, *args: Any, **kwargs: Any) -> Any:
        form = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        if (form.dtype, form.device) == (self.dtype, self.device):
            return self
        with outside_transforms():
            own = _Enter.apply(self).to(*args, **kwargs)
            made = _Leave.apply(own, self.values.replica, self.values.name)
        made.values.base, made.values.form_row = self.values, self.values.form_row.to(made.dtype)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what is asked of the form and the graph, and gather the rows for the rest."""
        kwargs = kwargs or {}
        if func is torch.Tensor.to and _is_cast(*args, **kwargs):
            return args[0]._cast(*args[1:], **kwargs)
        if func in _OF_GRAPH:
            args, kwargs = _mapped(Rows._in_graph, (args, kwargs))
        elif func not in _OF_FORM:
            given, options = gathered((args, kwargs))
            result = func(*given, **options)
            if not (args and isinstance(args[0], Rows)):
                return result
            if func is _DATA:
                args[0].values.version = -1  # PyTorch counts no writes into it
            now = args[0]._after_writing()
            return now if result is given[0] else result
        elif args[0]._whole is not None:
            args = args[0].whole(), *args[1:]
        with plain_torch_functions():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute below the graph, where a sum of gradients needs no rows of other replicas."""
        if func is torch.ops.aten.detach.default:
            return Rows.of(args[0].values)
        if func is torch.ops.aten.add.Tensor and not kwargs and args[0].shape == args[1].shape:
            values = next(each.values for each in args if isinstance(each, Rows))
            total = torch.add(*(_own_values(each, values.replica) for each in args))
            return Rows.of(_Values(values.replica, total, values.name))
        if func.overloadpacket in _OF_MEMORY:
            name = next(each.values.name for each in args if isinstance(each, Rows))
            how = func.overloadpacket.__name__
            raise UnsupportedModel(
                f"{name} was given different memory by {how} in a step, but it holds only the "
                "rows of one device.\nUse copy_ instead, or work on a copy: output.clone()."
            )
        given, options = _mapped(lambda each: each.values.gathered(), (args, kwargs or {}))
        result = func(*given, **options)
        return args[0] if func._schema.is_mutable else result


_OF_FORM = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "is_meta", "layout")
        ),
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.__len__,
        torch.Tensor.detach,
    }
)
"""What a tensor is asked without its values."""

_DATA = torch.Tensor.data.__get__

_OF_MEMORY = frozenset({torch.ops.aten.set_, torch.ops.aten.resize_})
"""What gives a tensor other memory, below the functions that Python sees."""

_OF_GRAPH = frozenset(
    {
        *(
            getattr(torch.Tensor, n).__get__
            for n in ("requires_grad", "grad_fn", "grad", "is_leaf")
        ),
        torch.Tensor.grad.__set__,
        torch.Tensor.grad.__delete__,
        torch.Tensor.requires_grad.__set__,
        torch.Tensor.requires_grad_,
        torch.Tensor.register_hook,
        torch.Tensor.retain_grad,
        torch.Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
    }
)
"""What a tensor is asked of its place in the gradient graph."""


def _is_cast(tensor: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether the arguments of `Tensor.to` are a type and a device for own rows."""
    plain = all(isinstance(each, torch.dtype | torch.device | str) for each in args)
    is_own = isinstance(tensor, Rows) and not tensor.is_gathered
    return is_own and plain and kwargs.keys() <= {"dtype", "device"}


def _mapped(function: Any, nest: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: function(leaf) if isinstance(leaf, Rows) else leaf, nest
    )


def gathered(nest: Any) -> Any:
    """Return a nest in which the rows of all replicas are gathered."""
    return _mapped(Rows.whole, nest)


def copied(nest: Any) -> Any:
    """Return a nest with the values of all replicas, without an effect on the step."""
    return _mapped(lambda leaf: leaf.values.copied(), nest)


def is_transformed() -> bool:
    """Return whether this runs in a function that `torch.func` differentiates or maps."""
    return transforms_in_force() is not None


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Compute inside the context as outside of `torch.inference_mode` and of `torch.func`.

    The first counts no writes into a tensor, and the second knows no operations of this module.
    """
    is_inference = torch.is_inference_mode_enabled()
    if not is_inference and not is_transformed():
        yield
        return
    gradients = torch.is_grad_enabled() and not is_inference
    with (
        temporarily_clear_interpreter_stack(),
        torch.inference_mode(mode=False),
        torch.set_grad_enabled(gradients),
    ):
        yield


def leave(own: Any, replica: Replica, name: str) -> Rows:
    """Return the tensor of the global batch of which this replica has these rows.

    Args:
        own: The rows of this replica, or the row that it has run for its form.
        replica: This replica.
        name: What they are, for an error.
    """
    made: Rows = _Leave.apply(replica.true_rows(own, name), replica, name)
    made.values.form_row = own.detach()
    mask = get_keras_mask(own)
    if mask is not None:
        set_keras_mask(made, leave(mask, replica, name))
    return made


def enter(tensor: Any, replica: Replica) -> Any:
    """Return the rows of this replica of a tensor of the global batch, with their mask.

    A replica without rows is given a row for its form.
    """
    own = _rows_of(tensor, replica)
    if not len(own):
        is_own = isinstance(tensor, Rows) and not tensor.is_gathered
        row = tensor.values.form_row if is_own else gathered(tensor)[:1]
        own = torch.cat([own, row.detach()])
    mask = get_keras_mask(tensor)
    if mask is not None:
        set_keras_mask(own, enter(mask, replica))
    return own


def _rows_of(tensor: Any, replica: Replica) -> Any:
    if isinstance(tensor, Rows) and not tensor.is_gathered:
        return _Enter.apply(tensor)
    return _Take.apply(gathered(tensor), replica)


def _own_values(tensor: Any, replica: Replica) -> Any:
    """Return the rows of this replica, below the graph."""
    if isinstance(tensor, Rows) and not tensor.is_gathered:
        return tensor.values.own
    every = tensor.values.every if isinstance(tensor, Rows) else tensor
    start = sum(replica.counts[: replica.rank])
    return every[start : start + replica.counts[replica.rank]]


_GRADIENT = "A gradient"


def _note_backward(group: RankGroup) -> None:
    if group.backward_order is not None:
        group.backward_order.in_backward()


class _Take(torch.autograd.Function):  # type: ignore[misc]
    """The rows of this replica of a replicated tensor."""

    @staticmethod
    def forward(ctx: Any, whole: Any, replica: Replica) -> Any:
        ctx.replica = replica
        return _own_values(whole, replica).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        _note_backward(ctx.replica.group)
        gathered = _Leave.apply(gradient, ctx.replica, _GRADIENT).whole()
        return gathered / ctx.replica.scale, None


class _Leave(torch.autograd.Function):  # type: ignore[misc]
    """The `Rows` of the rows of this replica."""

    @staticmethod
    def forward(ctx: Any, own: Any, replica: Replica, name: str) -> Any:
        ctx.replica = replica
        return Rows.of(_Values(replica, own.detach(), name))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        _note_backward(ctx.replica.group)
        return _rows_of(gradient, ctx.replica), None, None


class _Enter(torch.autograd.Function):  # type: ignore[misc]
    """The rows of this replica of `Rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Any) -> Any:
        ctx.replica = rows.values.replica
        return rows.values.own.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        _note_backward(ctx.replica.group)
        return _Leave.apply(gradient, ctx.replica, _GRADIENT)


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    """The replicated tensor of `Rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Any) -> Any:
        ctx.replica = rows.values.replica
        return rows.values.gathered().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        _note_backward(ctx.replica.group)
        scale = ctx.replica.scale
        if scale == 1:
            return gradient
        return _Leave.apply(_rows_of(gradient, ctx.replica) * scale, ctx.replica, _GRADIENT)


class _Used(torch.autograd.Function):  # type: ignore[misc]
    """Replicated tensors, as every replica uses them: their gradients are summed at a time."""

    @staticmethod
    def forward(ctx: Any, group: RankGroup, *values: Any) -> Any:
        ctx.group = group
        ctx.set_materialize_grads(False)  # a layer may use some of the weights
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _note_backward(ctx.group)
        reached = [gradient for gradient in gradients if gradient is not None]
        sums = iter(_Summed.apply(ctx.group, *reached) if reached else ())
        return None, *(None if gradient is None else next(sums) for gradient in gradients)


class _Summed(torch.autograd.Function):  # type: ignore[misc]
    """The replicated sums of tensors of each replica."""

    @staticmethod
    def forward(ctx: Any, group: RankGroup, *own: Any) -> Any:
        ctx.group = group
        ctx.set_materialize_grads(False)
        running = [group.start_sum([each.clone() for each in bucket]) for bucket in buckets_of(own)]
        return tuple(total for finish in running for total in finish())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _note_backward(ctx.group)
        reached = [gradient for gradient in gradients if gradient is not None]
        used = iter(_Used.apply(ctx.group, *reached) if reached else ())
        return None, *(None if gradient is None else next(used) for gradient in gradients)


class _SameOnAll(torch.autograd.Function):  # type: ignore[misc]
    """A scalar that does not depend on rows: every replica has computed the same."""

    @staticmethod
    def forward(ctx: Any, own: Any, group: RankGroup) -> Any:
        ctx.group = group
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient / ctx.group.size, None


used = _Used.apply
same_on_all = _SameOnAll.apply
