"""The interface of an engine, which `distribute` uses."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.devices import Device
from lockstep.launch.environment import Place

if TYPE_CHECKING:
    from lockstep.layout import Layout


class Engine(Protocol):
    """Runs Keras models of one backend on several devices.

    The contract is a post-condition: after `attach`, one training step over all devices
    equals that step on one device. The conformance suite tests it.
    """

    name: str
    """The name of the Keras backend."""

    def devices(self) -> tuple[Device, ...]:
        """Return the available devices, those of the default platform first."""
        ...

    def rehearse(self, devices: int) -> None:
        """Make `devices` virtual CPU devices and hide accelerators.

        Raises:
            RehearsalTooLate: If the backend has started with other devices.
        """
        ...

    def join(self, place: Place) -> tuple[int, int]:
        """Join the processes of a launcher, before a device is used.

        Args:
            place: The place of this process among them.

        Returns:
            The rank of this process, and the number of processes.

        Raises:
            ProcessesDisagree: If they cannot be joined.
            UnsupportedBackend: If the engine runs in one process.
        """
        ...

    def attach(self, model: Any, devices: tuple[str, ...]) -> None:
        """Make `model` run on `devices`, in place; on failure leave it unchanged.

        Args:
            model: A Keras model.
            devices: The names of the devices.
        """
        ...

    def detach(self, model: Any) -> None:
        """Make `model` run on one device again; do nothing if it is not attached."""
        ...

    def place(self, model: Any, layout: "Layout") -> None:
        """Make the layers of `model` run on the devices of a layout; on failure leave it unchanged.

        Raises:
            UnsupportedBackend: If the engine runs all layers on every device.
            LayoutConflict: If the model is distributed in another way.
        """
        ...

    def layout(self, model: Any) -> "Layout | None":
        """Return the layout that `place` was given, `None` if the layers are not placed."""
        ...

    def attached(self, model: Any) -> tuple[str, ...] | None:
        """Return the devices of `model`, or `None` if it is not attached."""
        ...

    def exchanged(self, values: Any, source: str, target: str) -> tuple[Any, Any]:
        """Copy integers from one device to another, and sum what both hold.

        Args:
            values: An array of the host.
            source: The name of a device.
            target: The name of another one.

        Returns:
            The copy and the sum as the target has them, as arrays of the host.
        """
        ...

    def profile(self, *, devices: bool) -> "AbstractContextManager[Profile]":
        """Measure compilation inside the context; the result is filled in at its end.

        Args:
            devices: Whether to profile the work of the devices too.
        """
        ...

    def probe(self, model: Any) -> "Probe":
        """Return a probe for the steps of `model`, attached or not."""
        ...


@dataclass
class Profile:
    """Seconds that a framework measures of its own work; `None` where it has no call for that.

    Attributes:
        compile: Tracing and compilation.
        compute: Computation of the busiest device.
        communication: Its collectives, including waits for other devices.
        full: Whether the profiler dropped events, so that nothing is known of the devices.
    """

    compile: float | None = None
    compute: float | None = None
    communication: float | None = None
    full: bool = False


class Probe(Protocol):
    """Inspects the training steps of one model, for `verify`."""

    def build(self, batch: Any) -> str | None:
        """Build what is not built yet, as `fit` does before or in its first step.

        The model is not attached. Its variables may have other values afterwards.

        Args:
            batch: A batch in the structure that `fit` passes to a training step.

        Returns:
            The shortest float type to which a step of a model in float64 casts values, such as
            `"float32"`; `None` if it computes in float64 alone, or if that is not known.

        Raises:
            UnusableData: If Keras cannot build the model from the batch.
        """
        ...

    def precise(self) -> AbstractContextManager[object]:
        """Compute matrix products in the full precision of their type inside the context.

        Several processes draw the random numbers of the first one.
        """
        ...

    def train(self, batch: Any, *, restart: bool = False) -> dict[str, Any]:
        """Train one step on a batch in the structure of `fit`, and return the logs.

        Results that are random in Keras on one device, such as dropped losses, are not random here.

        Args:
            batch: The batch.
            restart: Whether to trace the model again before the step, like a new process.
        """
        ...

    def inspect(self, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the layer outputs for `batch`, in order, and the gradient of each variable.

        The model does not change.
        """
        ...
