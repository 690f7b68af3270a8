"""Keras variables with a copy on every device."""

import gc
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from lockstep.attach.holders import holders_of
from lockstep.core.state import metric_variables, optimizers_of, unique, variables_of
from lockstep.engines.replicas.outdated_programs import trace_others_again
from lockstep.engines.tensorflow.tensorflow_compat import (
    ResourceVariable,
    UninitializedVariable,
    distribute_lib,
    get_read_write_resource_inputs,
    values,
)
from lockstep.keras_compat import (
    GLOBAL_SEED_GENERATOR,
    STRATEGY,
    global_state,
    store_value,
    stored_value,
    tracked_metrics,
)


class MirroredVariable(values.MirroredVariable):  # type: ignore[misc]
    """A mirrored variable that behaves like one variable outside of steps, without its strategy.

    A read uses the first copy, and an update writes all copies.
    """

    # tensorflow/python/distribute/values.py, DistributedVariable._update and _get_replica;
    # distribute_lib.py, _DefaultDistributionExtended._update_non_slot: an optimizer in a user's
    # own loop uses TensorFlow's default strategy, which passes the variable as replica number.
    def _update(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if isinstance(distribute_lib.get_update_replica_id(), int | None):
            return super()._update(update_fn, value, **kwargs)
        with distribute_lib.UpdateContext(None):
            return super()._update(update_fn, value, **kwargs)

    def _get_replica(self, replica_id: Any) -> Any:
        return super()._get_replica(replica_id if isinstance(replica_id, int) else 0)

    def __copy__(self) -> "MirroredVariable":
        return self


def _of_first_copy(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.values[0], name)(*args, **kwargs)

    return method


# tensorflow/python/ops/resource_variable_ops.py, BaseResourceVariable. Python looks special
# methods up on the class, so `__getattr__` of a mirrored variable does not give them.
_READS = """
    __array__ __bool__ __complex__ __deepcopy__ __float__ __iadd__ __idiv__ __imul__ __int__
    __ipow__ __irealdiv__ __isub__ __itruediv__ __long__ __nonzero__ __reduce__
    gather_nd sparse_read
"""
for _name in _READS.split():
    setattr(MirroredVariable, _name, _of_first_copy(_name))


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
                store_value(variable, self._mirror(value))
                mark_outdated(value)
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
        """Return the names of the variables that a traced step may change and that have no copies.

        A variable that the step only reads has one value for all replicas.
        """
        own = {id(copy.handle) for _, mirrored in self._mirrored for copy in mirrored.values}
        own |= {id(seeds.value.handle) for seeds in shared_seeds()}  # replicas draw in turn
        changed = {
            id(handle)
            for op in graph.get_operations()
            for handle in get_read_write_resource_inputs(op)[1]
        }
        found = []
        for outside, inside in graph.captures:
            # Tables and iterators are resources as well, but have no handle data.
            data = getattr(outside, "_handle_data", None)
            is_variable = outside.dtype == tf.resource and data is not None and data.is_set
            if is_variable and id(outside) not in own and id(inside) in changed:
                found.append(_name_of(outside))
        return sorted(found)

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
            setattr(copy, STRATEGY, None)  # a copy of it can be pickled, as of any variable
        mirrored.__class__ = MirroredVariable
        return mirrored


_OUTDATED = "_lockstep_outdated"


def mark_outdated(plain: Any) -> None:
    """Remember that a Keras variable does not hold this variable any more."""
    setattr(plain.handle, _OUTDATED, plain.name)


def outdated(handles: Iterable[Any]) -> list[str]:
    """Return the names of the variables of these handles that no Keras variable holds any more."""
    return sorted(name for each in handles if (name := getattr(each, _OUTDATED, None)))


def _name_of(handle: Any) -> str:
    """Return the name of the variable behind a handle, for errors."""
    for each in gc.get_objects():  # a handle does not know its variable
        if issubclass(type(each), ResourceVariable) and each.handle is handle:
            return repr(each.name.split(":")[0])
    return "one without a name"


def is_mirrored(value: Any) -> bool:
    """Return whether this is a mirrored variable."""
    return isinstance(value, tf.distribute.DistributedValues)


def is_left_by_a_model(variable: Any) -> bool:
    """Return whether a distributed model had a variable, and is gone without being released."""
    return isinstance(stored_value(variable), MirroredVariable) and not holders_of(variable)


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
    slots = [variable for _, optimizer in optimizers_of(model) for variable in optimizer.variables]
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


def empty_variable(variable: Any) -> Any:
    """Return a variable that was never initialized: Keras asks it for its identity."""
    return UninitializedVariable(
        trainable=variable.trainable, shape=variable.shape, dtype=variable.dtype
    )
