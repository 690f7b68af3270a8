"""The JAX engine: one program over a mesh that sees the global batch."""

from contextlib import nullcontext
from typing import Any

from lockstep.devices import Device
from lockstep.engines import attachments
from lockstep.engines.engine import DEFAULT_INPUT, InputOptions
from lockstep.engines.jax import cache
from lockstep.engines.jax import devices as jax_devices
from lockstep.engines.jax.attachment import Attachment
from lockstep.engines.jax.looks.probe import JaxProbe
from lockstep.engines.jax.outside import bring_home
from lockstep.engines.jax.several import processes
from lockstep.engines.jax.several.calls import CALLS
from lockstep.engines.jax.steps.scan import AUTO


class JaxEngine:
    """Runs Keras models on JAX devices; see `Engine` for the contract."""

    name = "jax"

    def devices(self) -> tuple[Device, ...]:
        """The devices JAX has, those of its default backend first."""
        return jax_devices.list_devices()

    def rehearse(self, devices: int) -> None:
        """Make `devices` virtual CPU devices, and hide accelerators."""
        jax_devices.make_virtual(devices)

    def attach(
        self, model: Any, devices: tuple[str, ...], options: InputOptions = DEFAULT_INPUT
    ) -> None:
        """Make `model` run on `devices`, in place; on failure leave it as it was."""
        processes.check_started()
        with CALLS.call("distribute") if processes.several() else nullcontext():
            processes.check_devices(jax_devices.find(devices))
            before = attachments.attachment_of(model)
            if before is not None and before.devices == devices:
                before.say_left_out(options, stacklevel=4)
                before.keeper.options = options
            else:
                cache.keep_programs()
                bring_home(model)  # a fit may be running
                times = getattr(model, "steps_per_execution", None)
                new = Attachment(model, devices, options, times)
                try:
                    attachments.attach(
                        new, lambda old: Attachment(model, old.devices, old.keeper.options, times)
                    )
                except BaseException:
                    if times == AUTO:  # which giving back takes away
                        model.steps_per_execution = times
                    raise

    def detach(self, model: Any) -> None:
        """Make `model` run on one device again; does nothing where it does already."""
        attachments.detach(model)

    def attached(self, model: Any) -> tuple[str, ...] | None:
        """The devices `model` runs on, `None` where it is not attached."""
        return attachments.attached(model)

    def input_options(self, model: Any) -> InputOptions:
        """What `attach` was told of the data of an attached model."""
        options: InputOptions = attachments.attachment_of(model).keeper.options
        return options

    def probe(self, model: Any) -> JaxProbe:
        """A way to look inside the steps of `model`, attached or not."""
        return JaxProbe(model)
