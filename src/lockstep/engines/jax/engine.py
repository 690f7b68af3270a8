"""The JAX engine: one program over a mesh, which processes the global batch."""

from contextlib import AbstractContextManager
from typing import Any

from lockstep.devices import Device
from lockstep.engines.engine import Engine, Profile
from lockstep.engines.jax import cache, jax_group, joining
from lockstep.engines.jax import devices as jax_devices
from lockstep.engines.jax.introspection import ahead_of_time, profile
from lockstep.engines.jax.introspection.probe import JaxProbe
from lockstep.engines.jax.session import JaxSession
from lockstep.engines.jax.steps.gather_again import would_gather_again
from lockstep.engines.jax.steps.state_layout import made_in_shards
from lockstep.engines.jax.variable_sync import sync_to_variables
from lockstep.engines.shard_rule import sharded_dims
from lockstep.launch.environment import Place
from lockstep.layout import Layout
from lockstep.step_bytes import LayoutBytes


class JaxEngine(Engine):
    """Run Keras models on JAX devices; see `Engine` for the contract."""

    name = "jax"
    keras_drops_states = True
    reduces_in_compute_type = True
    runs_micro_batches = True

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

    def check_shards(self) -> None:
        """Do nothing: JAX shards in one process and in several."""

    def made_in_shards(self, devices: tuple[str, ...]) -> AbstractContextManager[None]:
        """Shard each large variable that is made inside the context."""
        return made_in_shards(jax_devices.find(devices))

    def sharded_dims(self, model: Any, devices: int) -> dict[int, int | None]:
        """Return the dim along which each variable would be sharded, by `id`."""
        return sharded_dims(model, devices)

    def gathers_again(self, size: int, memory: float) -> bool:
        """Return whether a step gathers sharded weights again for its backward pass."""
        return would_gather_again(size, memory)

    def traced_step(self, model: Any, batch: Any) -> tuple[Any, list[Any]]:
        """Return the jaxpr of a training step on shapes, and the variables that it takes first."""
        return ahead_of_time.traced_step(model, batch)

    def compiled_bytes(
        self, model: Any, batch: Any, layout: LayoutBytes, gpu: dict[str, Any]
    ) -> tuple[int, int]:
        """Compile a training step on shapes for GPUs that are not here."""
        return ahead_of_time.compiled_bytes(model, batch, layout, gpu)

    def exchanged(self, values: Any, source: str, target: str) -> tuple[Any, Any]:
        """Copy integers from one device to another, and sum what both hold."""
        return jax_devices.exchanged(values, source, target)

    def profile(self, *, devices: bool) -> AbstractContextManager[Profile]:
        """Measure compilation, and the work of the devices if asked."""
        return profile.profiled(devices=devices)

    def probe(self, model: Any) -> JaxProbe:
        """Return a probe into the steps of `model`, attached or not."""
        return JaxProbe(model)
