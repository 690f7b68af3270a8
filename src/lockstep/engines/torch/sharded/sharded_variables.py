"""Variables of which each process has a part.

A part is a flat 1/N of the value, with zeros at the end so that all parts have one size. What reads
a variable decides what it gets. A step of all processes gathers the whole value, and its backward
pass sums the gradient into the parts. An optimizer sees the parts. Other code of rank 0 asks the
workers for theirs.
"""

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any, Protocol

import keras
import torch
from torch.autograd.function import once_differentiable

from lockstep.core.devices import is_large
from lockstep.core.state import item_bytes, unique, variables_of
from lockstep.engines.torch.exchange.group import RankGroup
from lockstep.engines.torch.exchange.placement import computes, version_of
from lockstep.engines.torch.sharded.gathered_values import GatheredValues, backward_of_own
from lockstep.engines.torch.torch_compat import current_backward
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import (
    REGISTERING,
    autocast_value,
    in_layer_call,
    store_value,
    stored_value,
    value_in_scope,
    variables_reported,
    wrap_methods_of_torch,
)

OUTSIDE, STEP, WHOLE, PARTS = "outside", "step", "whole", "parts"
"""What reads a variable: code of one process; a step; an update of whole values, or of parts."""


class Remote(Protocol):
    """Lets the other processes take part in what rank 0 does with a variable."""

    def gathered(self, part: Any) -> tuple[Any, bool]:
        """Return the parts of all processes, and whether other code has written into this one."""

    def scatter(self, part: Any, whole: Any) -> None:
        """Give each process its part of a whole value of rank 0."""


class Shards:
    """The variables of one model of which this process has a part.

    Attributes:
        variables: The variables.
        group: The processes.
        remote: What lets the others take part outside of a step; `None` in a worker.
        is_updating: Whether an update has begun that has not come to its end.
        host: The whole value of the one variable, on the host, until its model is distributed.
    """

    def __init__(self, remote: Remote | None = None, host: Any = None) -> None:
        self.variables: list[ShardedVariable] = []
        self.group: RankGroup | None = None
        self.remote = remote
        self.is_updating = False
        self.host = host
        self._reads = OUTSIDE
        self._thread = 0
        self._held: dict[int, tuple[Any, Any]] = {}
        self._gathered: GatheredValues | None = None
        self._new: dict[int, Any] = {}
        self._versions: dict[int, Any] = {}

    def __reduce__(self) -> Any:
        return Shards, ()

    @property
    def reads(self) -> str:
        """What reads variables now, in this thread.

        The backward pass of a GPU has a thread of its own, where `torch.utils.checkpoint` runs a
        layer again. The thread of the step waits for it.
        """
        # torch/utils/checkpoint.py asks so, too: -1 is outside of a backward pass.
        is_backward = current_backward() != -1
        of_step = is_backward or threading.get_ident() == self._thread
        return self._reads if of_step else OUTSIDE

    @contextmanager
    def read_by(self, what: str) -> Iterator[None]:
        """Let `STEP`, `WHOLE` or `PARTS` read variables inside the context.

        After `WHOLE`, the parts are those of the whole values that it has read and changed.
        """
        before, self._reads, self._thread = self.reads, what, threading.get_ident()
        held, self._held = self._held, {}
        if what == STEP and self.variables and torch.is_grad_enabled():
            self.note(map(stored_value, self.variables))
            self._gathered = GatheredValues(self._gathered_for)
        try:
            with nullcontext() if self._gathered is None else self._gathered.saved_by_form():
                yield
            if what == WHOLE:
                for variable, whole in self._held.values():
                    stored_value(variable).copy_(self._own(whole))
            elif what == STEP:
                self.drop()
        finally:
            if what == STEP and self._gathered is not None:
                self._gathered.end()
                self._gathered = None
            self._reads, self._held = before, held
            if before == OUTSIDE:
                self.note(map(stored_value, self.variables))

    def note(self, parts: Iterable[Any]) -> None:
        """Note that some parts of this process are as lockstep has left them."""
        self._versions.update((id(part), version_of(part)) for part in parts)

    def is_written(self, part: Any) -> bool:
        """Return whether other code has written into a part of this process since."""
        version = version_of(part)
        return bool(self._versions.get(id(part), version) != version)

    def check_written(self) -> None:
        """Raise before a step if other code has written into parts of this process.

        Raises:
            UnsupportedModel: If it has.
        """
        for variable in self.variables:
            if self.is_written(stored_value(variable)):
                raise _written(variable)

    def drop(self) -> None:
        """Free the whole values of a training step, after its backward pass.

        Raises:
            UnsupportedModel: If code has written into one.
        """
        gathered, self._gathered = self._gathered, None
        written = [] if gathered is None else gathered.end()
        if written:
            raise UnsupportedModel(
                f"A step writes into the value of {written[0].path!r} in place, but its state "
                "is sharded.\nThe value is a copy that is discarded after the step.\nUse a "
                "variable with trainable=False for values that a step writes, or remove "
                'state="sharded".'
            )

    # ------------------------------------------------------------ values

    def value(self, variable: "ShardedVariable") -> Any:
        """Return what code gets that reads a variable now."""
        part, shape = stored_value(variable), variable.whole_shape
        if self.reads == PARTS:
            return part
        if id(variable) in self._new:
            return self._new[id(variable)]
        if self.reads == OUTSIDE:
            return self._value_outside(variable)
        if self.reads == WHOLE:
            if id(variable) not in self._held:
                self._held[id(variable)] = variable, self.gathered(part, shape)
            return self._held[id(variable)][1]
        dtype = getattr(torch, variable.dtype)
        if self._gathered is None:
            with torch.inference_mode():  # nothing can write into it
                return self.gathered(part.detach().to(dtype), shape)
        whole = self._gathered.value(variable, dtype)
        return whole if torch.is_grad_enabled() else whole.detach()

    def _gathered_for(self, variable: "ShardedVariable", dtype: Any) -> Any:
        """Return a whole value in a type, whose gradient goes to the parts."""
        part = stored_value(variable)
        if self.is_written(part):
            raise _written(variable)
        return _Gather.apply(part, self, variable.whole_shape, dtype)

    def _value_outside(self, variable: "ShardedVariable") -> Any:
        part, shape = stored_value(variable), variable.whole_shape
        differentiable = torch.is_grad_enabled() and in_layer_call()
        with torch.inference_mode(not differentiable):  # nothing can write into it
            if self.host is not None:
                flat, is_written = self.host.to(part.device, copy=True).reshape(-1), False
            else:
                assert self.remote is not None, f"a worker reads {variable.path} outside of a step"
                flat, is_written = self.remote.gathered(part)
            if is_written:
                raise _written(variable)
            whole = autocast_value(variable, flat[: math.prod(shape)].view(shape))
        if differentiable and part.requires_grad:
            return _WithoutGradient.apply(part, whole, variable.path, self.host is not None)
        return whole

    def assign(self, variable: "ShardedVariable", value: Any) -> None:
        """Store a value of the form that `value` returns."""
        part = stored_value(variable)
        with torch.no_grad():
            if self.reads == PARTS:
                part.copy_(value)
            elif self.reads == WHOLE:
                self.value(variable).copy_(value)
            elif self.reads == STEP:
                raise _assigned(variable)
            elif self.host is not None:
                self.host.copy_(value)
            else:
                assert self.remote is not None, f"a worker assigns to {variable.path}"
                self.remote.scatter(part, value)

    def gathered(self, part: Any, shape: Sequence[int]) -> Any:
        """Return a whole value of this shape. Every process has to call this."""
        assert self.group is not None, "a step has set it"
        flat = self.group.gather(part, [len(part)] * self.group.size)
        return flat[: math.prod(shape)].view(shape)

    def summed(self, gradient: Any, size: int) -> Any:
        """Return this process's part of the sum of a gradient over all processes."""
        assert self.group is not None, "a step has set it"
        return self.group.sum_of_part(self.padded(gradient, size))

    def padded(self, whole: Any, size: int) -> Any:
        """Return a flat copy of a whole value, made of parts of this size."""
        assert self.group is not None, "there are parts"
        flat = whole.new_zeros(size * self.group.size)
        flat[: whole.numel()] = whole.detach().reshape(-1)
        return flat

    def _own(self, whole: Any) -> Any:
        assert self.group is not None, "there are parts"
        size = -(-whole.numel() // self.group.size)
        return self.padded(whole, size)[self.group.rank * size :][:size]

    # ------------------------------------------------------------ from whole values, and back

    def take(self, variables: list[Any], holders: list[Any]) -> None:
        """Keep the parts of whole variables. Their whole values stay until `send`.

        Args:
            variables: The variables.
            holders: The dicts of PyTorch's modules that hold tensors of variables too.
        """
        guard_layers()
        parts: dict[int, Any] = {}
        for variable in variables:
            before = stored_value(variable)
            whole = variable._shards.host if is_on_host(variable) else before
            own = self._own(whole).to(before.device, copy=True)
            part = torch.nn.Parameter(own, requires_grad=before.requires_grad)
            self._new[id(variable)] = whole
            parts[id(before)] = part
            store_value(variable, part)
            vars(variable)["_shards"] = self
            variable.__class__ = ShardedVariable
        self.variables += variables
        self.note(parts.values())
        _exchange(holders, parts)

    def share_memory(self, tensors: list[Any]) -> bool:
        """Return whether some of these tensors, or two new whole values, share their memory."""
        places = [whole.untyped_storage().data_ptr() for whole in self._new.values()]
        others = {each.untyped_storage().data_ptr() for each in tensors}
        return len(set(places)) < len(places) or not others.isdisjoint(places)

    def is_from_host(self, variable: Any) -> bool:
        """Return whether `take` has taken a variable from the host."""
        whole = self._new.get(id(variable))
        return whole is not None and not isinstance(whole, torch.nn.Parameter)

    def new(self) -> list["ShardedVariable"]:
        """Return the variables whose whole values are still here."""
        return [variable for variable in self.variables if id(variable) in self._new]

    def send(self) -> None:
        """Give the other processes their parts of what `take` has taken."""
        assert self.remote is not None, "rank 0 has it"
        for variable in self.new():
            self.remote.scatter(stored_value(variable), self._new[id(variable)])
        self.forget_new()

    def forget_new(self) -> None:
        """Free what `take` has taken: the other processes have their parts."""
        self._new.clear()

    def keep(self, parts: Collection[int]) -> None:
        """Forget the variables whose parts, given by `id`, the model does not have any more."""
        self.variables = [each for each in self.variables if id(stored_value(each)) in parts]

    def release(self, holders: list[Any], variables: list["ShardedVariable"]) -> None:
        """Make some variables plain ones again, with their whole values.

        Those that `take` has taken from the host go back to it.
        """
        wholes: dict[int, Any] = {}
        for variable in variables:
            part = stored_value(variable)
            whole = self._new.get(id(variable))
            if self.is_from_host(variable):
                self._new.pop(id(variable))
                wholes[id(part)] = hold_on_host(variable, whole)
                continue
            if whole is None:
                whole = _plain_value(variable)
            wholes[id(part)] = whole
            variable.__class__ = keras.Variable
            store_value(variable, whole)
            del variable._shards
            self._new.pop(id(variable), None)
        known = set(map(id, variables))
        self.variables = [each for each in self.variables if id(each) not in known]
        _exchange(holders, wholes)

    @contextmanager
    def whole_here(self, weights: list[Any]) -> Iterator[None]:
        """Let this process have the whole values of some variables inside the context."""
        found = [variable for variable in weights if is_sharded(variable)]
        parts = list(map(stored_value, found))
        try:
            for variable in found:
                whole = _plain_value(variable)
                variable.__class__ = keras.Variable
                store_value(variable, whole)
            versions = [version_of(stored_value(variable)) for variable in found]
            yield
            for variable, version in zip(found, versions, strict=True):
                if version_of(stored_value(variable)) != version:
                    raise _assigned(variable)
        finally:
            for variable, part in zip(found, parts, strict=True):
                store_value(variable, part)
                variable.__class__ = ShardedVariable


def _written(variable: Any) -> UnsupportedModel:
    return UnsupportedModel(
        f"{variable.path!r} was changed in place, for example through model.parameters(), but "
        "its state is sharded.\nThis has changed only the shard of one process.\nLoad or assign "
        "its whole value again, and change it only with variable.assign(...)."
    )


def _assigned(variable: Any) -> UnsupportedModel:
    return UnsupportedModel(
        f"A step assigns to {variable.path!r}, whose state is sharded.\nAnother process may "
        "assign a different value to its shard.\nUse a variable with trainable=False for values "
        'that a step writes, or remove state="sharded".'
    )


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, part: Any, shards: Shards, shape: Any, dtype: Any) -> Any:
        ctx.shards, ctx.size, ctx.dtype = shards, len(part), part.dtype
        return shards.gathered(part.to(dtype), shape)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Any) -> Any:
        return ctx.shards.summed(gradient.to(ctx.dtype), ctx.size), None, None, None


class _WithoutGradient(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, part: Any, whole: Any, path: str, on_host: bool) -> Any:
        ctx.path, ctx.on_host = path, on_host
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if ctx.on_host:
            raise UnsupportedModel(
                f"A backward pass reaches {ctx.path!r}, which was made in lockstep.sharded and "
                "is still on the host.\nThe devices do not have its shards yet.\nCall "
                'lockstep.distribute(model, state="sharded") first.'
            )
        raise backward_of_own(ctx.path)


class ShardedVariable(keras.Variable):  # type: ignore[misc]
    """A variable of which each process has a part.

    A variable gets this class when it is sharded, and loses it when it is released.
    """

    _shards: Shards

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole value."""
        shape: tuple[int, ...] = super().shape
        return shape

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what `value` returns."""
        return self.whole_shape if self._shards.reads != PARTS else tuple(stored_value(self).shape)

    @property
    def ndim(self) -> int:
        """The number of dims of what `value` returns."""
        return len(self.shape)

    @property
    def value(self) -> Any:
        """The whole value, or in an update of parts this process's part."""
        if not computes() or value_in_scope(self) is not None:
            return super().value
        if _PYTORCH_HAS_PARTS.get():
            return stored_value(self)
        return self._shards.value(self)

    def _direct_assign(self, value: Any) -> None:
        self._shards.assign(self, value)

    @property
    def constraint(self) -> Any:
        """The constraint, which an update of parts does not see."""
        return None if self._shards.reads == PARTS else super().constraint

    @constraint.setter
    def constraint(self, value: Any) -> None:
        keras.Variable.constraint.fset(self, value)

    def __repr__(self) -> str:
        return f"<Variable path={self.path}, shape={self.shape}, dtype={self.dtype}, in shards>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name != "_shards"}
        plain = _new_variable()
        vars(plain).update(state)
        store_value(plain, _plain_value(self))
        return _new_variable, (), vars(plain)


def _new_variable() -> Any:
    return keras.Variable.__new__(keras.Variable)


def _plain_value(variable: ShardedVariable) -> Any:
    """Return the whole value as Keras stores it."""
    with torch.no_grad():
        whole = variable.value.clone()
    return torch.nn.Parameter(whole, requires_grad=stored_value(variable).requires_grad)


def is_sharded(variable: Any) -> bool:
    """Return whether each process has a part of a variable."""
    return isinstance(variable, ShardedVariable)


def is_on_host(variable: Any) -> bool:
    """Return whether a variable is on the host, until its model is distributed."""
    return is_sharded(variable) and variable._shards.host is not None


def hold_on_host(variable: Any, whole: Any) -> Any:
    """Hold the value of a variable on the host, and return its empty part on the device."""
    before = stored_value(variable)
    part = torch.nn.Parameter(before.new_empty(0), requires_grad=before.requires_grad)
    store_value(variable, part)
    vars(variable)["_shards"] = Shards(host=whole)
    variable.__class__ = ShardedVariable
    return part


@contextmanager
def made_on_host(devices: int) -> Iterator[None]:
    """Move each large variable to the host that is made inside the context.

    Its initializer runs on the device, where one variable at a time is whole.
    """

    def move(variable: Any) -> None:
        whole = stored_value(variable)
        # Keras learns the shape of a variable that is made of an array from its value.
        if type(variable) is not keras.Variable or variable.shape is None or whole.is_meta:
            return
        if is_large(variable.shape, item_bytes(variable.dtype), devices):
            hold_on_host(variable, whole.detach().cpu())

    guard_layers()
    try:
        with variables_reported(move):
            yield
    except RuntimeError as error:
        if "requires_grad=True on inference tensor" not in str(error):
            raise
        raise UnsupportedModel(
            "A variable was created from the value of another variable in lockstep.sharded.\n"
            "That value is read-only.\nCreate the variable from a copy: keras.ops.copy(...)."
        ) from error


def guard_layers() -> None:
    """Let methods of PyTorch's modules raise that would give code of the user parts of weights."""
    wrap_methods_of_torch(_refusing, _GIVE_TENSORS)
    wrap_methods_of_torch(_with_parts, (*REGISTERING, "zero_grad", "requires_grad_"))


_GIVE_TENSORS = "parameters", "named_parameters", "state_dict", "load_state_dict"
_GUARDED = "_lockstep_guarded"
_PYTORCH_HAS_PARTS: ContextVar[bool] = ContextVar("PyTorch has parts", default=False)


@contextmanager
def parts_for_pytorch() -> Iterator[None]:
    """Let modules of PyTorch have the parts of this process inside the context."""
    token = _PYTORCH_HAS_PARTS.set(True)
    try:
        yield
    finally:
        _PYTORCH_HAS_PARTS.reset(token)


def _with_parts(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    return plain if hasattr(plain, _GUARDED) else _guarded(parts_for_pytorch()(plain))


def _refusing(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(plain, _GUARDED):
        return plain

    @wraps(plain)
    def refused(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if _PYTORCH_HAS_PARTS.get() or not any(map(is_sharded, layer.variables)):
            return plain(layer, *args, **kwargs)
        raise UnsupportedModel(
            f"{name} of {layer.name!r} was called, but its state is sharded.\n"
            "PyTorch's methods see only the shards of one process.\n"
            "Use Keras's variables, variable.assign, save_weights and load_weights instead."
        )

    return _guarded(refused)


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    setattr(method, _GUARDED, True)
    return method


def was_sharded(variable: Any) -> bool:
    """Return whether each process has a part, although `whole_here` may show the whole value."""
    return "_shards" in vars(variable)


def shards_in(variables: list[Any]) -> list[Shards]:
    """Return the shards to which some variables belong, each once."""
    return unique([variable._shards for variable in variables if is_sharded(variable)])


def shards_of(model: Any) -> Shards:
    """Return the shards of an unpickled model in a worker."""
    guard_layers()
    found = [variable for variable in variables_of(model) if is_sharded(variable)]
    shards = found[0]._shards if found else Shards()
    shards.variables = found
    return shards


def without_value(variable: ShardedVariable) -> tuple[Any, ...]:
    """Return how to pickle a plain variable of the same form, whose value takes no memory."""
    part = stored_value(variable)
    state = {name: value for name, value in vars(variable).items() if name != "_shards"}
    form = variable.whole_shape, part.dtype, str(part.device), part.requires_grad
    return _made_without_value, (state, *form)


def _made_without_value(
    state: dict[str, Any], shape: Any, dtype: Any, device: str, requires_grad: bool
) -> Any:
    variable = _new_variable()
    vars(variable).update(state)
    value = torch.zeros((), dtype=dtype, device=device).expand(shape)
    store_value(variable, torch.nn.Parameter(value, requires_grad=requires_grad))
    return variable


def whole_gradients(variables: Any, gradients: Any) -> list[Any]:
    """Return gradients of whole values. Every process has to call this."""
    return [
        variable._shards.gathered(gradient, variable.whole_shape)
        if gradient is not None and is_sharded(variable)
        else gradient
        for variable, gradient in zip(variables, gradients, strict=True)
    ]


def _exchange(holders: list[Any], tensors: dict[int, Any]) -> None:
    """Let dicts of PyTorch's modules hold other tensors, which are given by `id`."""
    for holder in holders:
        for name, tensor in list(holder.items()):
            if id(tensor) in tensors:
                holder[name] = tensors[id(tensor)]
