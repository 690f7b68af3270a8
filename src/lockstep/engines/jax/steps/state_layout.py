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

from lockstep.devices import sharded_dim
from lockstep.engines.branch_homes import owners_of_slots
from lockstep.engines.jax.steps.live_state import GROUPS_BY_NUMBER, State
from lockstep.engines.jax.variable_sync import group_of
from lockstep.keras_compat import (
    in_layer_call,
    layers_in,
    layout_of,
    set_layout,
    store_value,
    stored_value,
    variables_reported,
)
from lockstep.state import optimizers_of, rnn_states, variables_of


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
        model, mesh = self._model, self._mesh
        weights = [*model.variables, *model.trainable_variables]
        homes = {id(variable): home_by_shape(variable, mesh) for variable in weights}
        for layer in layers_in(model):
            if isinstance(layer, keras.layers.RNN):
                variables = [*layer.variables, *rnn_states(layer)]
                homes |= dict.fromkeys(map(id, variables), self.replicated)
        for _, optimizer in optimizers_of(model):
            owners = owners_of_slots(optimizer, model.trainable_variables)
            for slot in optimizer.variables:
                owner = owners.get(id(slot))
                homes[id(slot)] = home_by_shape(slot, mesh) if owner is None else homes[id(owner)]
        self._homes = homes

    def home(self, variable: Any) -> NamedSharding:
        """Return the layout of a variable."""
        return self._homes.get(id(variable), self.replicated)

    def of_state(self, state: State) -> list[list[Any]]:
        """Return the layout of each array in the state of a step."""
        return layouts_of_state(self._model, state, self.home, self.replicated)


def home_by_shape(variable: Any, mesh: Mesh) -> NamedSharding:
    """Return the layout of a variable that may be sharded. It is replicated if it is small."""
    dim = sharded_dim(variable.shape, jnp.dtype(variable.dtype).itemsize, mesh.size)
    if dim is None or type(variable) not in (keras.Variable, ShardedVariable):
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec(*[None] * dim, "batch"))


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
    """A layout that `distribute` gave to a variable. A copy of the variable has none."""

    def __init__(self, sharding: NamedSharding) -> None:
        super().__init__([None])
        self.sharding = sharding

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
        value = super()._maybe_autocast(value)
        if not in_layer_call():
            return value
        layout = layout_of(self).sharding
        # The first constraint lets the cast run on the shards. On GPUs, the gradient of both is one
        # reduce-scatter.
        shards = jax.lax.with_sharding_constraint(value, layout)
        return jax.lax.with_sharding_constraint(shards, NamedSharding(layout.mesh, PartitionSpec()))

    def _convert_to_tensor(self, value: Any, dtype: Any = None) -> Any:
        if not isinstance(value, jax.Array | keras.Variable | sparse.JAXSparse):
            host = np.asarray(value)
            if host.shape == tuple(self.shape):
                return _in_shards(host, layout_of(self).sharding, dtype or host.dtype)
        return super()._convert_to_tensor(value, dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return on_host(self.value).astype(dtype or self.value.dtype, copy=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = _new_variable()
        vars(plain).update(vars(self))
        set_layout(plain, None)
        store_value(plain, jnp.asarray(np.array(self)))
        return _new_variable, (), vars(plain)


def _new_variable() -> keras.Variable:
    return keras.Variable.__new__(keras.Variable)


def _in_shards(host: np.ndarray, layout: NamedSharding, dtype: Any) -> jax.Array:
    """Copy an array of the host to its shards. No device gets it whole."""

    def shard(part: Any) -> np.ndarray:  # a copy: on CPUs JAX may share memory with NumPy
        return np.array(host[part], jnp.dtype(dtype))

    return jax.make_array_from_callback(host.shape, layout, shard)


def on_host(value: Any) -> np.ndarray:
    """Copy an array to the host. JAX itself would keep a second copy in the array."""
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
    mesh = Mesh(np.array(devices), ("batch",))

    def shard(variable: Any) -> None:
        home = home_by_shape(variable, mesh)
        if not home.is_fully_replicated:
            first = np.asarray(stored_value(variable))
            hold_in_shards(variable, _in_shards(first, home, first.dtype))

    with variables_reported(shard):
        yield


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
