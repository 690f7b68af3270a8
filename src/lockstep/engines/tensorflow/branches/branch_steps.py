"""Keras's TensorFlow steps, with every operation on the device of its layer."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from lockstep.core.branch_homes import output_device, slots_made_at_home, variable_homes
from lockstep.core.call_scopes import CallScopes
from lockstep.core.layout import Branches
from lockstep.core.state import unique
from lockstep.engines.tensorflow.branches.op_devices import OpDevices, device_scope
from lockstep.engines.tensorflow.exchange.mirrored_variables import MirroredVariables
from lockstep.engines.tensorflow.steps.steps import Steps
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import (
    calls_of,
    layers_in,
    own_trainable_variables,
    stored_value,
    values_replaced,
)


class BranchSteps(Steps):
    """The steps of one model whose layers are on several devices.

    Each step is one program. TensorFlow splits it by the devices of its operations, and sends
    values from device to device. Operations that do not need one another run side by side.

    Attributes:
        layout: Where the layers run.
    """

    layout: Branches

    def __init__(self, model: Any, layout: Branches) -> None:
        strategy = tf.distribute.get_strategy()  # that of one replica
        super().__init__(model, strategy, MirroredVariables(strategy, self))  # none is mirrored
        self.layout = layout
        self._main = output_device(model, layout)
        self._homes: dict[int, str] = {}
        self._scopes = CallScopes(model, layout, self._scope)
        self._tracing = False

    def start(self) -> None:
        """Run the calls of layers on their devices."""
        self._scopes.put_on()

    def stop(self) -> None:
        """Undo `start`."""
        self._scopes.take_off()

    def adopt(self) -> None:
        """Decide where variables are that were created since the last call."""
        self._homes = variable_homes(self._model, self.layout)

    def home(self, variable: Any) -> str:
        """Return the device of a variable: that of its layer, else that of the first output."""
        return self._homes.get(id(variable), self._main)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Make optimizer slots on their devices inside the context."""
        optimizer = getattr(self._model, "optimizer", None)
        if optimizer is None or optimizer.built:
            yield
            return
        with slots_made_at_home(optimizer, self._home_of_new):
            yield

    def _home_of_new(self, variable: Any) -> str:
        if id(variable) not in self._homes:
            self.adopt()
        return self.home(variable)

    def check_mode(self) -> None:
        """Raise if the model is compiled to run eagerly."""
        if self._model.run_eagerly:
            raise UnsupportedModel(
                f"{self._model.name!r} has branches on several devices, but run_eagerly=True "
                "was requested.\nEager backward passes run only on the first device.\nRemove "
                "run_eagerly from compile(), or call lockstep.release(model) first."
            )

    def _step(self, name: str, data: Any, split: Any, whole: Any = None) -> Any:
        step = whole or getattr(self._model, name)
        self._tracing = True
        try:
            # Keras's program draws the batch. Without XLA, what needs no batch, such as the count
            # of steps, would run even if there is none left.
            with (
                tf.control_dependencies(_tensors(data)),
                OpDevices(self._main).in_force(),
                self.building(),
            ):
                return step(data)
        finally:
            self._tracing = False

    def _scope(self, device: str, operation: Any) -> AbstractContextManager[Any]:
        if tf.executing_eagerly():  # a direct call of the model
            context: AbstractContextManager[Any] = tf.device(device)
            return context
        return self._traced_scope(device, operation) if self._tracing else nullcontext()

    @contextmanager
    def _traced_scope(self, device: str, operation: Any) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(device_scope(device))
            # A wrapper may have a weight of the layer in it as an attribute too.
            for variable in unique([*self._from_elsewhere(device, operation)]):
                stack.enter_context(_copied(variable, self.home(variable)))
            yield

    def _from_elsewhere(self, device: str, operation: Any) -> Iterator[Any]:
        """Yield the weights of loops that a call on this device needs from another one.

        A weight outside of a loop is read from its device as it is. So `tf.custom_gradient` and
        `tf.recompute_grad` find the variable.
        """

        def follows(layer: Any) -> bool:
            nodes = [layer, *calls_of(layer)]
            return layer is operation or not any(id(each) in self.layout.fixed for each in nodes)

        for loop in (each for each in layers_in(operation) if isinstance(each, keras.layers.RNN)):
            for layer in filter(follows, layers_in(loop) if follows(loop) else ()):
                for variable in own_trainable_variables(layer):
                    if self.home(variable) != device:
                        yield variable


def _tensors(data: Any) -> list[Any]:
    leaves = tf.nest.flatten(data, expand_composites=True)
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]


def _copied(variable: Any, home: str) -> AbstractContextManager[Any]:
    """Give a variable the value of a copy on the device of the scope, inside the context.

    A loop would read the variable from its device again in each pass. The gradient of the copy goes
    to the device of the variable.
    """

    def copy_and_gradient(value: Any) -> tuple[Any, Callable[[Any], Any]]:
        def gradient(upstream: Any) -> Any:
            with device_scope(home):
                return tf.identity(upstream)

        return tf.identity(value), gradient

    # keras/src/backend/tensorflow/core.py, Variable
    copy = tf.custom_gradient(copy_and_gradient)(tf.convert_to_tensor(stored_value(variable)))
    return values_replaced([variable], [copy])
