"""What an engine is: the interface behind `distribute`."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.devices import Device

Data = tuple[Any, Any, Any]
"""Inputs or a data set, targets, and sample weights; the last two may be `None`."""


@dataclass(frozen=True)
class InputOptions:
    """How data get to the devices, where the user has a say.

    Attributes:
        data_on_devices: Whether NumPy data of a `fit` stay there; `None`: by size.
        prefetch: How many batches a thread makes ready before their turn; `None`: two of large
            NumPy data, on accelerators.
    """

    data_on_devices: bool | None = None
    prefetch: int | None = None


DEFAULT_INPUT = InputOptions()


class Engine(Protocol):
    """Runs Keras models of one backend on several devices.

    The contract is a post-condition, not this list of verbs: after `attach`, one
    training step over all devices equals that step on one device. The conformance
    suite is that sentence; whatever passes it is an engine.
    """

    name: str
    """The name of the Keras backend it serves."""

    def devices(self) -> tuple[Device, ...]:
        """The devices that are here, those of the default platform first."""
        ...

    def rehearse(self, devices: int) -> None:
        """Make `devices` virtual CPU devices, and hide accelerators.

        Raises:
            RehearsalTooLate: If the backend has started with other devices.
        """
        ...

    def attach(
        self, model: Any, devices: tuple[str, ...], options: InputOptions = DEFAULT_INPUT
    ) -> None:
        """Make `model` run on `devices`, in place; on failure leave it as it was.

        Args:
            model: A Keras model.
            devices: Their names.
            options: How data get there.
        """
        ...

    def detach(self, model: Any) -> None:
        """Make `model` run on one device again; does nothing where it does already."""
        ...

    def attached(self, model: Any) -> tuple[str, ...] | None:
        """The devices `model` runs on, `None` where it is not attached."""
        ...

    def input_options(self, model: Any) -> InputOptions:
        """What `attach` was told of the data of an attached model."""
        ...

    def probe(self, model: Any) -> "Probe":
        """A way to look inside the steps of `model`, attached or not."""
        ...


class Compiling(Protocol):
    """What was compiled: how many seconds it took."""

    seconds: float


class Trace(Protocol):
    """What the busiest device did: seconds of computation, and of communication.

    Nothing was seen where it was `full`: it had more to keep than it can.
    """

    seen: bool
    full: bool
    compute: float
    communication: float


class Clock(Protocol):
    """A callback that timed the steps of a `fit`.

    Attributes:
        done: Steps done, with those that are not timed.
        steps: Steps timed.
        executions: In so many executions.
        rows: Rows trained on in all of them.
        batch: Rows of the largest step.
        wall: Seconds from the begin of the first of them to the end of the last.
        host: Processor time of the main thread in that time.
    """

    done: int
    steps: int
    executions: int
    rows: int
    batch: int
    wall: float
    host: float


class Probe(Protocol):
    """Looks inside the training steps of one model, for `verify` and `bench`."""

    def compiling(self) -> AbstractContextManager[Compiling]:
        """Count the seconds that are spent on compiling while it lasts."""
        ...

    def tracing(self) -> AbstractContextManager[Trace]:
        """Profile the devices while it lasts; filled in when it ends."""
        ...

    def clock(self, most: int, *, settle: bool = False) -> Clock:
        """A callback for one `fit` that times its steps, and changes nothing else about it.

        Args:
            most: It stops training after so many steps and a few executions.
            settle: Not before lockstep has found out how many steps go into one program.
        """
        ...

    def feed(self, data: Data, batch_size: int | None, most: int) -> tuple[float, int]:
        """Draw the batches of one epoch as `fit` draws them, and train on none.

        Args:
            data: What `fit` is given: x, y and sample weights.
            batch_size: As in `fit`.
            most: So many batches at most.

        Returns:
            The seconds it took, and how many batches there were.
        """
        ...

    def precise(self) -> AbstractContextManager[object]:
        """While it lasts, matrix products have the full precision of their type."""
        ...

    def alike(self) -> AbstractContextManager[object]:
        """Let several processes begin with the values of the first one.

        Whoever asks puts values of variables back; what else was shared is put back at the end.
        """
        ...

    def fresh(self) -> None:
        """Trace the model anew at its next step, as a new process would."""
        ...

    def train(self, batch: tuple[Any, Any, Any]) -> dict[str, Any]:
        """Train one step on `batch`; the logs it gives.

        What Keras leaves to chance on one device is not left to it here.
        """
        ...

    def look(self, batch: tuple[Any, Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What each layer gives for `batch`, in order, and the gradient of each variable.

        Nothing of the model changes.
        """
        ...

    def notes(self) -> list[str]:
        """What is worth knowing of the step that was trained last, a sentence each."""
        ...
