"""Let PyTorch operations outside of layers take tensors of several devices, as Keras's do."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import torch
from torch.overrides import TorchFunctionMode

from lockstep.engines.torch.exchange.placement import current_device
from lockstep.engines.torch.torch_compat import current_function_mode, pop_mode_temporarily

_CPU = torch.device("cpu")


class MixedDevices(TorchFunctionMode):  # type: ignore[misc]  # PyTorch has no types for it
    """Moves the tensors of an operation to Keras's current device if they are on several ones.

    Losses, metrics, regularizers and the `call` of a subclassed model may add a tensor of one
    device to that of another one, or to a number that a constructor has made. An operation in
    place moves the others to its tensor.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found: list[torch.Tensor] = []
        _map(found.append, (args, list(kwargs.values())))
        # PyTorch takes a number of the CPU on every device.
        devices = {tensor.device for tensor in found if tensor.ndim or tensor.device != _CPU}
        name = getattr(func, "__name__", "")
        if len(devices) < 2 or _takes_several(func, name):
            return func(*args, **kwargs)
        device = found[0].device if _is_in_place(name, kwargs) else current_device()

        def there(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device)

        values = _map(there, list(kwargs.values()))
        return func(*_map(there, tuple(args)), **dict(zip(kwargs, values, strict=True)))


def mixed_devices() -> AbstractContextManager[Any]:
    """Return a context with the mode, which is entered once."""
    return nullcontext() if _is_active() else MixedDevices()


@contextmanager
def one_device_each() -> Iterator[None]:
    """Leave operations to PyTorch inside the context, which costs less: those of one layer."""
    if _is_active():
        with pop_mode_temporarily():
            yield
    else:
        yield


def _is_active() -> bool:
    return isinstance(current_function_mode(), MixedDevices)


def _map(function: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    if isinstance(nest, keras.Variable):
        nest = nest.value
    if isinstance(nest, torch.Tensor):
        return function(nest)
    if type(nest) in (list, tuple):
        return type(nest)([_map(function, each) for each in nest])
    return nest


def _takes_several(func: Any, name: str) -> bool:
    of_autograd = getattr(func, "__module__", None) == "torch.autograd"
    return of_autograd or name.startswith("_foreach") or name == "__set__"


def _is_in_place(name: str, kwargs: Any) -> bool:
    is_operator = name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return is_operator or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
