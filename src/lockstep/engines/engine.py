"""The interface of an engine: what only its framework can do."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.devices import Device
from lockstep.errors import UnsupportedBackend
from lockstep.launch.environment import Place
from lockstep.layout import Layout
from lockstep.step_bytes import LayoutBytes
from lockstep.training.session import Session


class Engine(ABC):
    """Runs Keras models of one backend on several devices.

    The contract is a post-condition: with a session open, one training step over all devices
    equals that step on one device. The conformance suite tests it.
    """

    name: str
    """The name of the Keras backend."""
    keras_drops_states = False
    """Whether stock Keras drops the states of stateful RNNs after each batch."""
    bench_in_several_processes = True
    """Whether a step can be measured in one of several processes."""
    reduces_in_compute_type = False
    """Whether gradients are summed over devices before they get the type of their variable."""

    runs_micro_batches = False
    """Whether a device can run its rows in parts."""

    def computes_in_caller(self, device: str) -> bool:
        """Return whether a step on this device computes in the thread that starts it."""
        return False

    @abstractmethod
    def devices(self) -> tuple[Device, ...]:
        """Return the available devices, those of the default platform first."""

    @abstractmethod
    def rehearse(self, devices: int) -> None:
        """Make `devices` virtual CPU devices and hide accelerators.

        Raises:
            RehearsalTooLate: If the backend has started with other devices.
        """

    @abstractmethod
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

    @abstractmethod
    def session(self, model: Any, layout: Layout) -> Session:
        """Return a session of `model` on its devices; nothing changes until it is opened.

        Args:
            model: A Keras model.
            layout: How it is laid out on its devices.
        """

    @abstractmethod
    def check_shards(self) -> None:
        """Raise if variables cannot be sharded.

        Raises:
            UnsupportedBackend: If the engine, or its mode, cannot.
        """

    def made_in_shards(self, devices: tuple[str, ...]) -> AbstractContextManager[None]:
        """Shard each large variable that is made inside the context; see `check_shards`."""
        raise NotImplementedError

    def sharded_dims(self, model: Any, devices: int) -> dict[int, int | None]:
        """Return the dim along which each variable would be sharded, by `id`; see `check_shards`.

        It is `None` for a variable that each device has whole, such as one that is not in the dict.
        """
        raise NotImplementedError

    def gathers_again(self, size: int, memory: float) -> bool:
        """Return whether a step gathers sharded weights again for its backward pass.

        Otherwise it keeps them from the forward pass, or never has them all at once.

        Args:
            size: The bytes of all sharded weights.
            memory: The bytes of a device.
        """
        return False

    def empty_value(self, variable: Any) -> Any:
        """Return what a variable without a value stores; it takes no memory."""
        return None

    def traced_step(self, model: Any, batch: Any) -> tuple[Any, list[Any]]:
        """Return the jaxpr of a training step on shapes, and the variables that it takes first.

        Args:
            model: A model that is built. No value is read.
            batch: The shapes of a batch.

        Raises:
            UnsupportedBackend: If the engine traces no jaxpr.
        """
        raise UnsupportedBackend(f"{self.name} traces no step without data.")

    def compiled_bytes(
        self, model: Any, batch: Any, layout: LayoutBytes, gpu: dict[str, Any]
    ) -> tuple[int, int]:
        """Compile a training step on shapes for GPUs that are not here.

        Args:
            model: A model that is built. No value is read.
            batch: The shapes of a global batch.
            layout: The number of GPUs, and how the variables are laid out.
            gpu: What XLA has to know of the GPU.

        Returns:
            The bytes of the arguments of a device, and of its temporaries.

        Raises:
            UnsupportedBackend: If the engine, or what is installed, cannot.
        """
        raise UnsupportedBackend(
            f"gpu= was given, and {self.name} compiles no step for a GPU that is not here.\n"
            "Set KERAS_BACKEND=jax."
        )

    @abstractmethod
    def exchanged(self, values: Any, source: str, target: str) -> tuple[Any, Any]:
        """Copy integers from one device to another, and sum what both hold.

        Args:
            values: An array of the host.
            source: The name of a device.
            target: The name of another one.

        Returns:
            The copy and the sum as the target has them, as arrays of the host.
        """

    @abstractmethod
    def probe(self, model: Any) -> "Probe":
        """Return a probe for the steps of `model`, attached or not."""

    def profile(self, *, devices: bool) -> "AbstractContextManager[Profile]":
        """Measure compilation inside the context; the result is filled in at its end.

        Args:
            devices: Whether to profile the work of the devices too.
        """
        return nullcontext(Profile())


def no_shards(what: str, why: str, remedy: str) -> UnsupportedBackend:
    """Return the error for a state that the engine cannot shard.

    Args:
        what: Where the model runs.
        why: The reason, as a sentence.
        remedy: The one thing to do, as a sentence.
    """
    return UnsupportedBackend(
        f'state="sharded" was asked for, and {what} has state="replicated" only.\n{why}\n{remedy}'
    )


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

    def inspect(
        self, batches: Iterable[Any], *, layers: bool = True
    ) -> Generator[tuple[dict[str, Any], dict[str, Any]], None, None]:
        """Yield the layer outputs of each batch, in order, and the gradient of each variable.

        A batch does not change the model. The caller may assign values between two batches.

        Args:
            batches: Batches in the structure that `fit` passes to a training step.
            layers: Whether the outputs of layers are wanted.
        """
        ...
