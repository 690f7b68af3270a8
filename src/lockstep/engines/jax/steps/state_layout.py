"""Where the variables of a model are on a mesh: a copy on every device, or a shard on each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import sparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lockstep.core.branch_homes import owners_of_slots
from lockstep.core.devices import sharded_dim
from lockstep.core.state import item_bytes, optimizers_of, rnn_states, variables_of
from lockstep.engines.jax.processes import jax_group
from lockstep.engines.jax.steps.execution import GROUPS_BY_NUMBER, State
from lockstep.engines.jax.steps.variable_sync import group_of
from lockstep.keras_compat import (
    in_layer_call,
    in_stateless_scope,
    layers_in,
    layout_of,
    set_layout,
    store_value,
    stored_value,
    variables_reported,
)
from lockstep.processes import process_group
from lockstep.processes.reads_of_all import ReadsOfFirst


class Replicated:
    """Every device has every variable.

    Attributes:
        replicated: The layout of an array that every device has.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.replicated = NamedSharding(mesh, PartitionSpec())

    def adopt(self) -> None:
        """Decide where variables are that were created since the last call."""

    def home(self, variable: Any) -> NamedSharding:
        """Return the layout of a variable."""
        return self.replicated

    def of_state(self, state: State) -> list[list[Any]]:
        """Return the layout of each array in the state of a step."""
        return [[self.replicated] * len(group) for group in state]


class Sharded(Replicated):
    """Every device has a shard of each large variable, and of its optimizer slots.

    The variables of RNNs are replicated: a collective would run in each step of their loop.
    Metrics are replicated as well.

    Args:
        model: The model.
        mesh: The devices.
    """

    def __init__(self, model: Any, mesh: Mesh) -> None:
        super().__init__(mesh)
        self._model, self._mesh = model, mesh
        self._homes: dict[int, NamedSharding] = {}

    def adopt(self) -> None:
        """Decide where variables are that were created since the last call."""
        mesh = self._mesh
        dims = sharded_dims(self._model, mesh.size, _KINDS)
        self._homes = {key: _along(dim, mesh) for key, dim in dims.items()}

    def home(self, variable: Any) -> NamedSharding:
        """Return the layout of a variable."""
        return self._homes.get(id(variable), self.replicated)

    def of_state(self, state: State) -> list[list[Any]]:
        """Return the layout of each array in the state of a step."""
        return layouts_of_state(self._model, state, self.home, self.replicated)


def _along(dim: int | None, mesh: Mesh) -> NamedSharding:
    """Return the layout with shards along a dim, or with copies for `None`."""
    spec = () if dim is None else (*[None] * dim, "batch")
    return NamedSharding(mesh, PartitionSpec(*spec))


def layouts_of_state(
    model: Any, state: State, home: Callable[[Any], Sharding], other: Sharding
) -> list[list[Any]]:
    """Return the layout of each array in the state of a step.

    Args:
        model: The model.
        state: The groups of variables.
        home: Returns the layout of a variable.
        other: The layout of values whose variables do not exist yet.
    """
    layouts = []
    for name, values in zip(GROUPS_BY_NUMBER[len(state)], state, strict=True):
        homes = [home(variable) for variable in group_of(model, name)]
        layouts.append([*homes, *[other] * len(values)][: len(values)])
    return layouts


class ShardedLayout(keras.distribution.TensorLayout):  # type: ignore[misc]
    """A layout that `distribute` gave to a variable. A copy of the variable has none.

    Attributes:
        sharding: The layout in the terms of JAX.
        number: The number of the variable among those in shards of its model.
        is_saved: Whether the process reads the variable to save it, and the others follow.
    """

    def __init__(self, sharding: NamedSharding) -> None:
        super().__init__([None])
        self.sharding = sharding
        self.number = 0
        self.is_saved = False

    @property
    def backend_layout(self) -> NamedSharding:
        """The layout in the terms of JAX, to which Keras moves each assigned value."""
        return self.sharding

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class ShardedVariable(keras.Variable):  # type: ignore[misc]
    """A variable with a shard of its value on each device.

    A variable gets this class when it is sharded, and loses it when it is released. Layers read the
    whole value, in the type in which they compute. All other code, such as the optimizer, reads the
    shards.
    """

    def _maybe_autocast(self, value: Any) -> Any:
        if not in_layer_call():
            if layout_of(self).is_saved:  # a layer with LoRA computes what it saves
                value = jax_group.whole(value, layout_of(self).number)
            return super()._maybe_autocast(value)
        if jax_group.GROUP.is_spread(value) and not in_stateless_scope():
            # Outside a step, a process computes by itself.
            return super()._maybe_autocast(jax_group.whole(value, layout_of(self).number))
        value = super()._maybe_autocast(value)
        layout = layout_of(self).sharding
        # The first constraint lets the cast run on the shards. On GPUs, the gradient of both is one
        # reduce-scatter.
        shards = jax.lax.with_sharding_constraint(value, layout)
        return jax.lax.with_sharding_constraint(shards, NamedSharding(layout.mesh, PartitionSpec()))

    def _convert_to_tensor(self, value: Any, dtype: Any = None) -> Any:
        if not isinstance(value, jax.Array | keras.Variable | sparse.JAXSparse) or (
            process_group.several() and _is_here(value)
        ):
            host = np.asarray(value)
            if host.shape == tuple(self.shape):
                return _in_shards(host, layout_of(self).sharding, dtype or host.dtype)
        return super()._convert_to_tensor(value, dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        host = on_host(self.value, layout_of(self).number)
        return host.astype(dtype or host.dtype, copy=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = _new_variable()
        vars(plain).update(vars(self))
        set_layout(plain, None)
        store_value(plain, jnp.asarray(np.array(self)))
        return _new_variable, (), vars(plain)


_KINDS = (keras.Variable, ShardedVariable)


def _new_variable() -> keras.Variable:
    return keras.Variable.__new__(keras.Variable)


def _in_shards(host: np.ndarray, layout: NamedSharding, dtype: Any) -> jax.Array:
    """Copy an array of the host to its shards. No device gets it whole."""
    if process_group.several():
        host = process_group.agreed_array(np.asarray(host, jnp.dtype(dtype)))

    def shard(part: Any) -> np.ndarray:  # a copy: on CPUs JAX may share memory with NumPy
        return np.array(host[part], jnp.dtype(dtype))

    return jax.make_array_from_callback(host.shape, layout, shard)


def _is_here(value: Any) -> bool:
    """Return whether a value is an array of this process alone."""
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_array and value.is_fully_addressable


def on_host(value: Any, number: int = 0) -> np.ndarray:
    """Copy an array to the host. JAX itself would keep a second copy in the array.

    Args:
        value: The array.
        number: Its number; see `jax_group.whole`.
    """
    value = jax_group.whole(value, number)
    if isinstance(value, jax.core.Tracer) or value.is_fully_replicated:
        return np.asarray(value)
    host = np.empty(value.shape, value.dtype)
    for shard in value.addressable_shards:
        host[shard.index] = np.asarray(jnp.copy(shard.data))
    return host


def hold_in_shards(variable: Any, value: Any) -> None:
    """Store a value in its shards, to which later assignments go as well."""
    set_layout(variable, ShardedLayout(value.sharding))
    store_value(variable, value)
    variable.__class__ = ShardedVariable


def is_held_in_shards(variable: Any) -> bool:
    """Return whether assigned values go to shards."""
    return isinstance(layout_of(variable), ShardedLayout)


def drop_shards(variable: Any) -> None:
    """Make a variable one of Keras again, whose value is still in shards."""
    if is_held_in_shards(variable):
        set_layout(variable, None)
        variable.__class__ = keras.Variable


@contextmanager
def made_in_shards(devices: list[jax.Device]) -> Iterator[None]:
    """Shard each large variable that is made inside the context.

    Its initializer runs as on one device and gives the same bits. One variable at a time is whole.
    """
    jax_group.check_devices(devices)
    mesh = Mesh(np.array(devices), ("batch",))

    def shard(variable: Any) -> None:
        home = _along(dim_by_shape(variable, mesh.size, _KINDS), mesh)
        if home.is_fully_replicated:
            return
        first = stored_value(variable)
        if not jax_group.GROUP.is_spread(first):  # Keras makes a slot like its variable
            first = _in_shards(np.asarray(first), home, first.dtype)
        hold_in_shards(variable, first)

    with variables_reported(shard):
        yield


class SavedShards(ReadsOfFirst):
    """The variables in shards of a model that the first of several processes writes to a file.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        # They are numbered anew, as the model may share variables with another one.
        super().__init__(
            lambda: numbered(variables_of(model)),
            lambda variable: jax_group.gathered(stored_value(variable)),
        )

    @contextmanager
    def read_with_all(self) -> Iterator[None]:
        """Let the other processes follow what this process reads inside the context."""
        layouts = list(map(layout_of, self._variables()))
        for layout in layouts:
            layout.is_saved = True
        try:
            with super().read_with_all():
                yield
        finally:
            for layout in layouts:
                layout.is_saved = False


def numbered(variables: list[Any]) -> list[Any]:
    """Number the variables in shards, by which processes agree on what they read."""
    found = [variable for variable in variables if is_held_in_shards(variable)]
    for number, variable in enumerate(found):
        layout_of(variable).number = number
    return found


@contextmanager
def read_as_stored(model: Any) -> Iterator[None]:
    """Let layers read variables as they are stored inside the context, without a gather."""
    variables = [v for v in variables_of(model) if isinstance(v, ShardedVariable)]
    for variable in variables:
        variable.__class__ = keras.Variable
    try:
        yield
    finally:
        for variable in variables:
            variable.__class__ = ShardedVariable


Kinds = tuple[type, ...]
"""Classes of variables that can be sharded. An instance of a subclass is replicated."""


def dim_by_shape(variable: Any, devices: int, kinds: Kinds) -> int | None:
    """Return the dim along which a variable is sharded; `None` if it is replicated."""
    if type(variable) not in kinds:
        return None
    return sharded_dim(variable.shape, item_bytes(variable.dtype), devices)


def sharded_dims(
    model: Any, devices: int, kinds: Kinds = (keras.Variable,)
) -> dict[int, int | None]:
    """Return the dim along which each weight and optimizer slot is sharded, by its `id`.

    It is `None` for a replicated one. The variables of RNNs are replicated: a collective would run
    in each step of their loop. A slot is sharded like its variable. Other variables, such as those
    of metrics, are replicated.

    Args:
        model: The model.
        devices: The number of devices.
        kinds: The classes of variables that can be sharded.
    """
    weights = [*model.variables, *model.trainable_variables]
    dims = {id(variable): dim_by_shape(variable, devices, kinds) for variable in weights}
    for layer in layers_in(model):
        if isinstance(layer, keras.layers.RNN):
            variables = [*layer.variables, *rnn_states(layer)]
            dims |= dict.fromkeys(map(id, variables))
    for _, optimizer in optimizers_of(model):
        owners = owners_of_slots(optimizer, model.trainable_variables)
        for slot in optimizer.variables:
            owner = owners.get(id(slot))
            by_shape = dim_by_shape(slot, devices, kinds)
            dims[id(slot)] = by_shape if owner is None else dims[id(owner)]
    return dims
