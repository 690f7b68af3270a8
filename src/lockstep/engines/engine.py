"""The interface of an engine, which `distribute` uses."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.devices import Device
from lockstep.launch.environment import Place

if TYPE_CHECKING:
    from lockstep.layout import Layout

Data = tuple[Any, Any, Any]
"""Inputs or a data set, targets, and sample weights; the last two may be `None`."""


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

    def probe(self, model: Any) -> "Probe":
        """Return a probe for the steps of `model`, attached or not."""
        ...


@dataclass
class Compiling:
    """The time spent on compilation, in seconds."""

    seconds: float = 0.0


@dataclass
class Trace:
    """The work of the busiest device. Each second counts in one of the two kinds.

    Attributes:
        seen: Whether the work of a device was measured.
        full: Whether the profiler dropped events, so that there are no results.
        compute: Seconds of computation.
        communication: Seconds in collectives, including waits for other devices.
    """

    seen: bool = False
    full: bool = False
    compute: float = 0.0
    communication: float = 0.0


class Clock(Protocol):
    """A callback that times the steps of a `fit`.

    Attributes:
        done: Number of all steps, timed or not.
        steps: Number of timed steps.
        executions: Number of executions of the timed steps.
        rows: Rows of all timed steps.
        batch: Rows of the largest step.
        wall: Seconds from the start of the first timed step to the end of the last.
        host: Processor time of the main thread in that time, in seconds.
    """

    done: int
    steps: int
    executions: int
    rows: int
    batch: int
    wall: float
    host: float


class Probe(Protocol):
    """Inspects the training steps of one model, for `verify` and `bench`."""

    def compiling(self) -> AbstractContextManager[Compiling]:
        """Measure the time spent on compilation inside the context."""
        ...

    def tracing(self) -> AbstractContextManager[Trace]:
        """Profile the devices inside the context; the trace is filled in at its end."""
        ...

    def clock(self, most: int) -> Clock:
        """Return a callback for one `fit` that only times its steps and stops it at a limit.

        Args:
            most: The limit: about so many steps, plus a few executions.
        """
        ...

    def feed(self, data: Data, batch_size: int | None, most: int) -> tuple[float, int]:
        """Draw the batches of one epoch like `fit`, without training.

        Args:
            data: The data of the `fit`: x, y and sample weights.
            batch_size: As in `fit`.
            most: The maximum number of batches.

        Returns:
            The time in seconds, and the number of batches.
        """
        ...

    def precise(self) -> AbstractContextManager[object]:
        """Compute matrix products in the full precision of their type inside the context."""
        ...

    def synchronized(self) -> AbstractContextManager[object]:
        """Copy the values of the first process to all processes.

        The end of the context restores all other shared state, but the caller has to restore
        the values of variables.
        """
        ...

    def restart(self) -> None:
        """Trace the model again at its next step, like a new process."""
        ...

    def build(self, batch: Any) -> None:
        """Build what is not built yet, as `fit` does before or in its first step.

        Args:
            batch: A batch in the structure that `fit` passes to a training step.

        Raises:
            UnusableData: If Keras cannot build the model from the batch.
        """
        ...

    def lowered(self, batch: Any) -> str | None:
        """Return the shortest float type to which a training step casts float64 values.

        The model is not attached. The call may train one step.

        Args:
            batch: A batch in the structure that `fit` passes to a training step.

        Returns:
            The type, such as `"float32"`; `None` if the step computes in float64 alone.
        """
        ...

    def train(self, batch: Any) -> dict[str, Any]:
        """Train one step on a batch in the structure of `fit`, and return the logs.

        Results that are random in Keras on one device, such as dropped losses, are not random here.
        """
        ...

    def inspect(self, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the layer outputs for `batch`, in order, and the gradient of each variable.

        The model does not change.
        """
        ...

    def notes(self) -> list[str]:
        """Return notes on the step that was trained last, one sentence each."""
        ...
