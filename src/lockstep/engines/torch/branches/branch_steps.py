"""Keras's PyTorch steps, in one process, with each layer on its device."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import torch

from lockstep.engines.branch_homes import output_device, variable_homes
from lockstep.engines.call_scopes import CallScopes
from lockstep.engines.torch.branches.local_calls import LocalCalls, tensors_on
from lockstep.engines.torch.branches.local_updates import updates_at_home
from lockstep.engines.torch.branches.mixed_devices import mixed_devices
from lockstep.engines.torch.placement import computes, torch_device_of
from lockstep.engines.torch.step_runner import StepRunner
from lockstep.keras_compat import layers_in, stored_value, torch_default_device
from lockstep.layout import Branches
from lockstep.state import optimizers_of, unique, variables_of


class BranchSteps(StepRunner):
    """Runs the steps of one model whose layers are on several devices; see `StepRunner`.

    Each batch runs in this process, by Keras's own step. Every variable is on the device of its
    layer, an optimizer slot on that of its variable, and all others on that of the first output,
    which also computes the loss and the metrics.

    Args:
        model: The model.
        layout: Where the layers run.
    """

    def __init__(self, model: Any, layout: Branches) -> None:
        self.layout = layout
        self._main = output_device(model, layout)
        super().__init__(model, torch_device_of(self._main))
        self._homes: dict[int, str] = {}
        self._calls = LocalCalls(model, layout)
        self._scopes = CallScopes(model, layout, _scope)

    def start(self) -> None:
        """Run the calls of layers on their devices."""
        self._calls.put_on()
        self._scopes.put_on()

    def stop(self) -> None:
        """Undo `start`."""
        self._scopes.take_off()
        self._calls.take_off()

    def adopt(self) -> None:
        """Decide where variables are that were created since the last call."""
        self._homes = variable_homes(self._model, self.layout)
        self._calls.forget_variables()

    def home(self, variable: Any) -> str:
        """Return the device of a variable."""
        return self._homes.get(id(variable), self._main)

    def move(self) -> None:
        """Move every variable to its device, in place."""
        for layer in layers_in(self._model):  # inner layers after those around them
            for buffer in layer.buffers():  # of PyTorch modules in a TorchModuleWrapper
                _move(buffer, torch_device_of(self.layout.home(layer)))
        for variable in self.variables():
            if stored_value(variable) is not None:
                _move(stored_value(variable), torch_device_of(self.home(variable)))

    def variables(self) -> list[Any]:
        """Return every variable of the model and of its optimizers."""
        slots = [slot for each in self._optimizers() for slot in each.variables]
        return unique([*variables_of(self._model), *slots])

    def _optimizers(self) -> list[Any]:
        return [optimizer for _, optimizer in optimizers_of(self._model)]

    @contextmanager
    def on_devices(self) -> Iterator[None]:
        """Run a step of Keras, or build the model, inside the context."""
        with _scope(self._main, None), mixed_devices(), updates_at_home(self._optimizers()):
            yield

    def calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` of the model, with its outputs on the device of the first output."""
        local = self._calls.local(self._model, whole=False)

        @functools.wraps(call)
        def call_on_devices(*args: Any, **kwargs: Any) -> Any:
            if not computes():
                return call(*args, **kwargs)
            with _scope(self._main, None), mixed_devices():
                return tensors_on(self._device, local(*args, **kwargs))

        return call_on_devices


def to_default_device(variables: list[Any]) -> None:
    """Move variables to the device on which Keras makes its tensors, in place."""
    device = torch.empty(0, device=torch_default_device()).device
    for variable in variables:
        if stored_value(variable) is not None:
            _move(stored_value(variable), device)


def _scope(device: str, _: Any) -> AbstractContextManager[Any]:
    if not computes():
        return nullcontext()
    scope: AbstractContextManager[Any] = keras.device(str(torch_device_of(device)))
    return scope


def _move(tensor: Any, device: torch.device) -> None:
    if tensor.device != device:
        tensor.data = tensor.data.to(device)
        tensor.grad = None  # that of the last step, on the old device
