"""The JAX engine: one program over a mesh, which processes the global batch."""

from contextlib import AbstractContextManager
from typing import Any

from lockstep.core.devices import Device
from lockstep.core.engine import Engine
from lockstep.core.environment import Place
from lockstep.core.layout import Layout
from lockstep.engines.jax import devices as jax_devices
from lockstep.engines.jax.introspection.probe import JaxProbe
from lockstep.engines.jax.processes import jax_group, joining
from lockstep.engines.jax.session import JaxSession
from lockstep.engines.jax.steps import cache
from lockstep.engines.jax.steps.state_layout import made_in_shards, sharded_dims
from lockstep.engines.jax.steps.variable_sync import sync_to_variables


class JaxEngine(Engine):
    """Run Keras models on JAX devices; see `Engine` for the contract."""

    name = "jax"

    def devices(self) -> tuple[Device, ...]:
        """Return JAX's devices, those of its default backend first."""
        return jax_devices.list_devices()

    def rehearse(self, devices: int) -> None:
        """Make `devices` virtual CPU devices, and hide accelerators."""
        jax_devices.make_virtual(devices)

    def join(self, place: Place) -> tuple[int, int]:
        """Join the processes of a launcher, unless this has been done."""
        return joining.join(place)

    def session(self, model: Any, layout: Layout) -> JaxSession:
        """Return a session of `model`; see `Engine`."""
        jax_group.check_started()
        jax_group.check_devices(jax_devices.find(layout.devices))
        cache.keep_programs()
        sync_to_variables(model)  # an unattached model may be in a fit
        return JaxSession(model, layout)

    def made_in_shards(self, devices: tuple[str, ...]) -> AbstractContextManager[None]:
        """Shard each large variable that is made inside the context."""
        return made_in_shards(jax_devices.find(devices))

    def sharded_dims(self, model: Any, devices: int) -> dict[int, int | None]:
        """Return the dim along which each variable would be sharded, by `id`."""
        return sharded_dims(model, devices)

    def probe(self, model: Any) -> JaxProbe:
        """Return a probe into the steps of `model`, attached or not."""
        return JaxProbe(model)
