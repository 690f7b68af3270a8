"""Keras variables with a copy on every device."""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from lockstep.engines.holders import holders_of


class Copies:
    """The variables of one model, each with a copy on every device.

    Outside of a step a Keras variable holds TensorFlow's mirrored variable: it reads
    its first copy, and whoever assigns to it, assigns to all. Inside a step each
    replica wears its own copies, which are plain variables of its device, so that
    all that Keras and its optimizers do to them is what they do on one device. On one
    device, a variable that is there already stays as it is.

    Attributes:
        version: Changes where a variable is mirrored, which a traced step that had it
            as a plain one has to know.
    """

    def __init__(self, strategy: Any, holder: Any) -> None:
        self._strategy = strategy
        self._holder = holder
        self.version = 0
        self._mirrored: list[tuple[Any, Any]] = []
        self._plain: list[Any] = []

    def take_in(self, variables: Iterable[Any]) -> None:
        """Hold these Keras variables, and mirror those that are not yet."""
        held = {id(variable) for variable in self._held()}
        for variable in variables:
            # keras/src/backend/tensorflow/core.py, Variable._initialize
            if id(variable) in held or variable._value is None:
                continue
            holders_of(variable).add(self._holder)
            if devices_of(variable) == self._holder.devices and not is_mirrored(variable._value):
                self._plain.append(variable)
                continue
            if not is_mirrored(variable._value):
                variable._value = self._mirror(variable._value)
                self.version += 1
            self._mirrored.append((variable, variable._value))

    def let_go(self) -> None:
        """Make those variables plain again that nobody else holds."""
        for variable in self._held():
            holders = holders_of(variable)
            holders.discard(self._holder)
            if not holders:
                make_plain(variable)
        self._mirrored.clear()
        self._plain.clear()

    def put_on(self, replica: int) -> None:
        """Let every Keras variable be its copy on this replica."""
        for variable, mirrored in self._mirrored:
            variable._value = mirrored.values[replica]

    def take_off(self) -> None:
        """Let every Keras variable be the mirrored one again."""
        for variable, mirrored in self._mirrored:
            variable._value = mirrored

    def spread(self) -> None:
        """Copy what the first device holds to the others."""
        for _, mirrored in self._mirrored:
            first, *others = mirrored.values
            for other in others:
                other.assign(first)

    def places(self) -> dict[int, str]:
        """Which variable each copy is of, by the identity of the copy's handle."""
        return {
            id(copy.handle): f"variable {number}"
            for number, (_, mirrored) in enumerate(self._mirrored)
            for copy in mirrored.values
        }

    def strangers(self, graph: Any) -> list[str]:
        """The variables that a traced step uses, and that have no copies."""
        own = {id(copy.handle) for _, mirrored in self._mirrored for copy in mirrored.values}
        own |= {id(seeds.value.handle) for seeds in shared_seeds()}  # drawn from in turn
        names = {id(variable.handle): variable.name for variable in graph.variables}
        found = set()
        for outside, _ in graph.captures:
            # A table or an iterator is a resource as well, and has no data like a variable.
            data = getattr(outside, "_handle_data", None)
            if outside.dtype == tf.resource and data is not None and data.is_set:
                found.add(id(outside))
        return sorted(names.get(handle, "one without a name") for handle in found - own)

    def _held(self) -> list[Any]:
        return [*(variable for variable, _ in self._mirrored), *self._plain]

    def _mirror(self, plain: Any) -> Any:
        with tf.init_scope(), self._strategy.scope():
            mirrored = tf.Variable(
                tf.convert_to_tensor(plain),
                trainable=plain.trainable,
                dtype=plain.dtype,
                name=plain.name.split(":")[0],
                shape=plain.shape,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
        for copy in mirrored.values:
            # The name by which an optimizer knows a variable that it was built with,
            # keras/src/backend/tensorflow/optimizer.py, TFOptimizer._var_key
            copy._unique_id = plain._unique_id
        vars(mirrored).update(_outside_of_steps(mirrored))
        return mirrored


def _outside_of_steps(mirrored: Any) -> dict[str, Any]:
    """Methods of a mirrored variable for whoever updates it without its strategy.

    So does an optimizer in a loop of the user's own, or when it overwrites the weights with
    their averages: it asks TensorFlow's default strategy, which takes the variable itself
    for the number of a replica. All copies are updated, and the first one is read.
    """
    # tensorflow/python/distribute/values.py, DistributedVariable._update and _get_replica;
    # distribute_lib.py, _DefaultDistributionExtended._update_non_slot
    plain_update, plain_get = mirrored._update, mirrored._get_replica

    def update(update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if isinstance(distribute_lib.get_update_replica_id(), int | None):
            return plain_update(update_fn, value, **kwargs)
        with distribute_lib.UpdateContext(None):
            return plain_update(update_fn, value, **kwargs)

    def get(replica_id: Any) -> Any:
        return plain_get(replica_id if isinstance(replica_id, int) else 0)

    return {"_update": update, "_get_replica": get}


def is_mirrored(value: Any) -> bool:
    """Whether this is a variable with copies."""
    return isinstance(value, tf.distribute.DistributedValues)


def devices_of(variable: Any) -> tuple[str, ...]:
    """The devices that hold a Keras variable."""
    values = variable._value.values if is_mirrored(variable._value) else (variable._value,)
    return tuple(short_name(value.device) for value in values)


def make_plain(variable: Any) -> None:
    """Let a Keras variable be one plain variable again: its first copy."""
    if not is_mirrored(variable._value):
        return
    plain = variable._value.values[0]
    # tensorflow/python/distribute/values.py, DistributedVariable.__init__
    for holder in (plain, plain.handle):
        if hasattr(holder, "_distributed_container"):
            del holder._distributed_container
    variable._value = plain


def short_name(device: str) -> str:
    """`cpu:0` for `/job:localhost/replica:0/task:0/device:CPU:0`.

    Example:
        >>> short_name("/job:localhost/replica:0/task:0/device:CPU:0")
        'cpu:0'
    """
    return ":".join(device.lower().split(":")[-2:])


def variables_of(model: Any) -> list[Any]:
    """Every variable a step of `model` reads or writes, each once."""
    found = [*model.variables, *model.metrics_variables]
    optimizer = getattr(model, "optimizer", None)
    found += optimizer.variables if optimizer is not None else []
    for layer in model._flatten_layers():
        # The states of an RNN are in no list of variables, keras/src/layers/rnn/rnn.py
        if isinstance(layer, keras.layers.RNN) and layer.stateful and layer.states is not None:
            found += keras.tree.flatten(layer.states)
    shared = {id(seeds) for seeds in shared_seeds()}
    return list({id(v): v for v in found if id(v) not in shared}.values())


def shared_seeds() -> list[Any]:
    """The seeds of whoever names none, in all models; none where nobody has drawn yet.

    To make them here would draw from Python's random numbers, and change a shuffle.
    """
    # keras/src/random/seed_generator.py, global_seed_generator
    get = keras.src.backend.common.global_state.get_global_attribute
    generator = get("global_seed_generator")
    return [] if generator is None else [generator.state]
