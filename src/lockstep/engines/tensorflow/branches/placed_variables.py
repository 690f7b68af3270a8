"""Keras variables that are each on the device of their layer."""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from lockstep.attach.holders import holders_of
from lockstep.engines.replicas.outdated_programs import trace_others_again
from lockstep.engines.tensorflow import devices as tensorflow_devices
from lockstep.engines.tensorflow.exchange.mirrored_variables import devices_of, mark_outdated
from lockstep.keras_compat import store_value, stored_value


class PlacedVariables:
    """The variables of one model, each on one device; see `MirroredVariables`.

    A variable of TensorFlow stays where it is made. So a Keras variable that moves gets a new one.

    Attributes:
        version: A counter that grows when a variable moves. A step that was traced with the
            earlier variable is then outdated.
    """

    def __init__(self, home: Callable[[Any], str], holder: Any) -> None:
        self._home = home
        self._holder = holder
        self.version = 0
        self._held: list[Any] = []

    def take_in(self, variables: Iterable[Any]) -> None:
        """Hold these Keras variables, and move those that are on another device."""
        held = {id(variable) for variable in self._held}
        moved = []
        for variable in variables:
            # keras/src/backend/tensorflow/core.py, Variable._initialize
            if id(variable) in held or stored_value(variable) is None:
                continue
            holders_of(variable).add(self._holder)
            self._held.append(variable)
            if move(variable, self._home(variable)):
                moved.append(variable)
        self.version += len(moved)
        trace_others_again(self._holder.model, moved)

    def let_go(self) -> None:
        """Release all variables, and move those without another holder to the default device."""
        default = tensorflow_devices.list_devices()[0].name
        moved = []
        for variable in self._held:
            holders = holders_of(variable)
            holders.discard(self._holder)
            if not holders and move(variable, default):
                moved.append(variable)
        self._held.clear()
        trace_others_again(self._holder.model, moved)


def move(variable: Any, device: str) -> bool:
    """Put a Keras variable on one device, and return whether it was on another one."""
    if devices_of(variable) == (device,):
        return False
    plain = stored_value(variable)
    with tf.init_scope(), tf.device(device):
        moved = tf.Variable(
            tf.convert_to_tensor(plain),
            trainable=plain.trainable,
            dtype=plain.dtype,
            name=plain.name.split(":")[0],
            shape=plain.shape,
            aggregation=plain.aggregation,
            synchronization=plain.synchronization,
        )
    # A built optimizer finds its variables by this name:
    # keras/src/backend/tensorflow/optimizer.py, TFOptimizer._var_key
    moved._unique_id = plain._unique_id
    store_value(variable, moved)
    mark_outdated(plain)
    return True
