"""The JAX engine: one program over a mesh, which processes the global batch."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lockstep.devices import Device
from lockstep.engines import attachments
from lockstep.engines.base_engine import BaseEngine
from lockstep.engines.engine import Profile
from lockstep.engines.jax import cache, jax_group, joining
from lockstep.engines.jax import devices as jax_devices
from lockstep.engines.jax.attachment import Attachment
from lockstep.engines.jax.branches.branch_steps import BranchSteps
from lockstep.engines.jax.introspection import profile
from lockstep.engines.jax.introspection.probe import JaxProbe
from lockstep.engines.jax.variable_sync import sync_to_variables
from lockstep.errors import UnsupportedBackend
from lockstep.launch.environment import Place
from lockstep.layout import Layout, both_layouts
from lockstep.processes import process_group
from lockstep.processes.call_scope import CALLS


class JaxEngine(BaseEngine):
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

    def attach(self, model: Any, devices: tuple[str, ...]) -> None:
        """Make `model` run on `devices`, in place. After a failure the model is unchanged."""
        jax_group.check_started()
        with CALLS.call("distribute") if process_group.several() else nullcontext():
            jax_group.check_devices(jax_devices.find(devices))
            before = attachments.attachment_of(model)
            if before is not None and before.layout is not None:
                raise both_layouts(model, "distribute")
            if before is None or before.devices != devices:
                cache.keep_programs()
                with attachments.alone(model, "distribute"):
                    sync_to_variables(model)  # an unattached model may be in a fit
                    attachments.attach(Attachment(model, devices), Attachment.again)

    def place(self, model: Any, layout: Layout) -> None:
        """Make the layers of `model` run on their devices. After a failure it is unchanged."""
        jax_group.check_started()
        if process_group.several():
            raise UnsupportedBackend(
                f"{model.name!r} was to have layers on several devices, and JAX runs in several "
                "processes,\nwhere every device runs all layers. Start one process."
            )
        before = attachments.attachment_of(model)
        if before is not None and before.layout is None:
            raise both_layouts(model, "place")
        cache.keep_programs()
        with attachments.alone(model, "place"):
            sync_to_variables(model)
            steps = BranchSteps(model, layout)
            attachments.attach(Attachment(model, layout.devices, steps), Attachment.again)

    def exchanged(self, values: Any, source: str, target: str) -> tuple[Any, Any]:
        """Copy integers from one device to another, and sum what both hold."""
        return jax_devices.exchanged(values, source, target)

    def profile(self, *, devices: bool) -> AbstractContextManager[Profile]:
        """Measure compilation, and the work of the devices if asked."""
        return profile.profiled(devices=devices)

    def probe(self, model: Any) -> JaxProbe:
        """Return a probe into the steps of `model`, attached or not."""
        return JaxProbe(model)
