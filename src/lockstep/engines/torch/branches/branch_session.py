"""One model whose layers are on several PyTorch devices, all of this process."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import torch

from lockstep.attach.holders import holders_of
from lockstep.core.branch_homes import output_device, variable_homes
from lockstep.core.call_scopes import CallScopes
from lockstep.core.engine import Guard, Home, Kind, Methods
from lockstep.core.layout import Branches
from lockstep.core.state import optimizers_of, unique, variables_of
from lockstep.engines.torch.branches.local_calls import LocalCalls, tensors_on
from lockstep.engines.torch.branches.local_updates import updates_at_home
from lockstep.engines.torch.branches.mixed_devices import mixed_devices
from lockstep.engines.torch.exchange.placement import computes, torch_device_of
from lockstep.engines.torch.ranks.step_runner import leave_host
from lockstep.engines.torch.session import TorchSession
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import BUILD, layers_in, stored_value, torch_default_device


class BranchSession(TorchSession):
    """One model whose layers are on several devices of this process; see `Session`.

    Each batch runs by Keras's own step. Every variable is on the device of its layer, an optimizer
    slot on that of its variable, and all others on that of the first output, which also computes
    the loss and the metrics.
    """

    layout: Branches

    def __init__(self, model: Any, layout: Branches) -> None:
        self._main = output_device(model, layout)
        self._device = torch_device_of(self._main)
        self._homes: dict[int, str] = {}
        self._calls = LocalCalls(model, layout)
        self._scopes = CallScopes(model, layout, _scope)
        super().__init__(model, layout)
        _check_not_compiled(model)

    def open(self) -> None:
        """Move the variables to their devices, and run the calls of layers there."""
        self._move_to_homes()
        self._calls.put_on()
        self._scopes.put_on()
        self._adopt(first=True)

    def close(self) -> None:
        """Undo `open`, even if it failed halfway."""
        self._scopes.take_off()
        self._calls.take_off()
        variables = self._variables()
        for variable in variables:
            holders_of(variable).discard(self)
        _to_default_device([variable for variable in variables if not holders_of(variable)])

    def _adopt(self, first: bool) -> None:
        """Move variables from the host that were made in `lockstep.sharded`."""
        leave_host(self.model)

    def home(self, variable: Any) -> Home:
        """Return the device of a variable."""
        return Home(self._home(variable))

    def _home(self, variable: Any) -> str:
        return self._homes.get(id(variable), self._main)

    def methods(self, methods: Methods, guarded: Guard) -> Methods:
        """Return the methods of all engines, and those that call and build on the devices."""
        return methods | {"call": self._calling(self.model.call), BUILD: self._build}

    def _made(self, kind: Kind) -> Callable[[Any], Any]:
        """Make the step function of Keras."""
        _check_not_compiled(self.model)
        self._move_to_homes()
        return super()._made(kind)

    def _on_one(self, plain: Callable[[Any], Any], batches: list[Any]) -> Any:
        with self._on_devices():
            return super()._on_one(plain, batches)

    def _build(self, *args: Any, **kwargs: Any) -> Any:
        """Build what a step needs, with every variable on its device."""
        with self._on_devices():
            built = getattr(type(self.model), BUILD)(self.model, *args, **kwargs)
        self._move_to_homes()
        return built

    def _find_homes(self) -> None:
        """Decide where variables are that were created since the last call."""
        self._homes = variable_homes(self.model, self.layout)
        self._calls.forget_variables()

    def _move_to_homes(self) -> None:
        self._find_homes()
        self._move()
        for variable in self._variables():
            holders_of(variable).add(self)

    def _move(self) -> None:
        """Move every variable to its device, in place."""
        for layer in layers_in(self.model):  # inner layers after those around them
            for buffer in layer.buffers():  # of PyTorch modules in a TorchModuleWrapper
                _move(buffer, torch_device_of(self.layout.home(layer)))
        for variable in self._variables():
            if stored_value(variable) is not None:
                _move(stored_value(variable), torch_device_of(self._home(variable)))

    def _variables(self) -> list[Any]:
        """Return every variable of the model and of its optimizers."""
        slots = [slot for each in self._optimizers() for slot in each.variables]
        return unique([*variables_of(self.model), *slots])

    def _optimizers(self) -> list[Any]:
        return [optimizer for _, optimizer in optimizers_of(self.model)]

    @contextmanager
    def _on_devices(self) -> Iterator[None]:
        """Run a step of Keras, or build the model, inside the context."""
        with _scope(self._main, None), mixed_devices(), updates_at_home(self._optimizers()):
            yield

    def _calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` of the model, with its outputs on the device of the first output."""
        local = self._calls.local(self.model, whole=False)

        @functools.wraps(call)
        def call_on_devices(*args: Any, **kwargs: Any) -> Any:
            if not computes():
                return call(*args, **kwargs)
            with _scope(self._main, None), mixed_devices():
                return tensors_on(self._device, local(*args, **kwargs))

        return call_on_devices


def _to_default_device(variables: list[Any]) -> None:
    """Move variables to the device on which Keras makes its tensors, in place."""
    device = torch.empty(0, device=torch_default_device()).device
    for variable in variables:
        if stored_value(variable) is not None:
            _move(stored_value(variable), device)


def _check_not_compiled(model: Any) -> None:
    """Raise if Keras would compile the steps of a model with layers on several devices."""
    if getattr(model, "jit_compile", False):
        raise UnsupportedModel(
            f"{model.name!r} has branches on several devices, which jit_compile=True does not "
            "support:\ntorch.compile would make one program of the step.\nRemove jit_compile "
            "from compile(), or call lockstep.release(model) first."
        )


def _scope(device: str, _: Any) -> AbstractContextManager[Any]:
    if not computes():
        return nullcontext()
    scope: AbstractContextManager[Any] = keras.device(str(torch_device_of(device)))
    return scope


def _move(tensor: Any, device: torch.device) -> None:
    if tensor.device != device:
        tensor.data = tensor.data.to(device)
        tensor.grad = None  # that of the last step, on the old device
