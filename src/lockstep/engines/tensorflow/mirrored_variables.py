"""Keras variables with a copy on every device."""

import weakref
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from lockstep.engines.holders import holders_of
from lockstep.engines.outdated_programs import trace_others_again
from lockstep.keras_compat import (
    GLOBAL_SEED_GENERATOR,
    global_state,
    store_value,
    stored_value,
    tracked_metrics,
)
from lockstep.state import metric_variables, unique, variables_of


class MirroredVariables:
    """The variables of one model, each with a copy on every device.

    Outside a step, a Keras variable holds TensorFlow's mirrored variable. A read uses the
    first copy, and an assignment writes all copies. Inside a step, the Keras variable holds
    the replica's own copy, a plain variable. So Keras and its optimizers work as on one
    device. A single device does not mirror the variables that it already holds.

    Attributes:
        version: A counter that grows when a variable is mirrored. A step that was traced
            with the plain variable is then outdated.
    """

    def __init__(self, strategy: Any, holder: Any) -> None:
        self._strategy = strategy
        self._holder = holder
        self.version = 0
        self._mirrored: list[tuple[Any, Any]] = []
        self._plain: list[Any] = []
        self._replaced: list[weakref.ref[Any]] = []

    def take_in(self, variables: Iterable[Any]) -> None:
        """Hold these Keras variables, and mirror those that are still plain."""
        held = {id(variable) for variable in self._held()}
        moved = []
        for variable in variables:
            # keras/src/backend/tensorflow/core.py, Variable._initialize
            value = stored_value(variable)
            if id(variable) in held or value is None:
                continue
            holders_of(variable).add(self._holder)
            if devices_of(variable) == self._holder.devices and not is_mirrored(value):
                self._plain.append(variable)
                continue
            if not is_mirrored(value):
                self._replaced.append(weakref.ref(value))
                store_value(variable, self._mirror(value))
                moved.append(variable)
            self._mirrored.append((variable, stored_value(variable)))
        self.version += len(moved)
        trace_others_again(self._holder.model, moved)

    def let_go(self) -> None:
        """Release all variables, and make those without another holder plain."""
        moved = []
        for variable in self._held():
            holders = holders_of(variable)
            holders.discard(self._holder)
            if not holders and is_mirrored(stored_value(variable)):
                make_plain(variable)
                moved.append(variable)
        self._mirrored.clear()
        self._plain.clear()
        trace_others_again(self._holder.model, moved)

    def put_on(self, replica: int) -> None:
        """Set every Keras variable to its copy on this replica."""
        for variable, mirrored in self._mirrored:
            store_value(variable, mirrored.values[replica])

    def take_off(self) -> None:
        """Set every Keras variable to its mirrored variable again."""
        for variable, mirrored in self._mirrored:
            store_value(variable, mirrored)

    def spread(self) -> None:
        """Copy the values of the first device to the others."""
        for _, mirrored in self._mirrored:
            first, *others = mirrored.values
            for other in others:
                other.assign(first)

    def places(self) -> dict[int, str]:
        """Return a name of the variable for each copy, by the identity of the copy's handle."""
        return {
            id(copy.handle): f"variable {number}"
            for number, (_, mirrored) in enumerate(self._mirrored)
            for copy in mirrored.values
        }

    def strangers(self, graph: Any) -> list[str]:
        """Return the names of the variables that a traced step uses and that have no copies."""
        own = {id(copy.handle) for _, mirrored in self._mirrored for copy in mirrored.values}
        own |= {id(seeds.value.handle) for seeds in shared_seeds()}  # replicas draw in turn
        names = {id(variable.handle): variable.name for variable in graph.variables}
        found = set()
        for outside, _ in graph.captures:
            # Tables and iterators are resources as well, but have no handle data.
            data = getattr(outside, "_handle_data", None)
            if outside.dtype == tf.resource and data is not None and data.is_set:
                found.add(id(outside))
        return sorted(names.get(handle, "one without a name") for handle in found - own)

    def outdated(self, graph: Any) -> list[str]:
        """Return the names of variables that a traced step uses and that were mirrored since."""
        captured = {id(outside) for outside, _ in graph.captures}
        alive = [plain for ref in self._replaced if (plain := ref()) is not None]
        return sorted(plain.name for plain in alive if id(plain.handle) in captured)

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
            # A built optimizer finds its variables by this name:
            # keras/src/backend/tensorflow/optimizer.py, TFOptimizer._var_key
            copy._unique_id = plain._unique_id
        vars(mirrored).update(_outside_of_steps(mirrored))
        return mirrored


def _outside_of_steps(mirrored: Any) -> dict[str, Any]:
    """Return methods of a mirrored variable that allow updates without its strategy.

    An optimizer makes such updates in a user's own training loop, and when it overwrites the
    weights with their averages. It then uses TensorFlow's default strategy, which passes the
    variable itself as replica number. An update writes all copies, and a read uses the first.
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
    """Return whether this is a mirrored variable."""
    return isinstance(value, tf.distribute.DistributedValues)


def devices_of(variable: Any) -> tuple[str, ...]:
    """Return the devices that hold a Keras variable."""
    value = stored_value(variable)
    values = value.values if is_mirrored(value) else (value,)
    return tuple(short_name(value.device) for value in values)


def make_plain(variable: Any) -> None:
    """Set a Keras variable that is mirrored to its first copy, a plain variable."""
    plain = stored_value(variable).values[0]
    # tensorflow/python/distribute/values.py, DistributedVariable.__init__
    for holder in (plain, plain.handle):
        if hasattr(holder, "_distributed_container"):
            del holder._distributed_container
    store_value(variable, plain)


def short_name(device: str) -> str:
    """Return lockstep's name of a TensorFlow device.

    Example:
        >>> short_name("/job:localhost/replica:0/task:0/device:CPU:0")
        'cpu:0'
    """
    return ":".join(device.lower().split(":")[-2:])


def mirrored_variables(model: Any) -> list[Any]:
    """Return the variables that a step of `model` may use, without the shared seeds."""
    optimizers = [v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer)]
    slots = [variable for optimizer in optimizers for variable in optimizer.variables]
    found = unique([*variables_of(model), *_tracked_metric_variables(model), *slots])
    shared = {id(seeds) for seeds in shared_seeds()}
    return [variable for variable in found if id(variable) not in shared]


def _tracked_metric_variables(model: Any) -> list[Any]:
    """Return the variables of every metric that Keras tracks for a model.

    A user's `metrics` property may omit metrics that a step updates. For example, Keras's
    default training step always updates its own loss tracker.
    """
    tracked = [variable for metric in tracked_metrics(model) for variable in metric.variables]
    return metric_variables(model) + tracked


def shared_seeds() -> list[Any]:
    """Return the global seed state of Keras, as a list that is empty until the first draw.

    All models without explicit seeds share it. Creating it here would draw from Python's
    random numbers and change a later shuffle.
    """
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return [] if generator is None else [generator.state]
