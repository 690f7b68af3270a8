"""The interface of an engine: what only its framework can do.

Everything else is written once, above the engines. An engine answers three questions: what devices
there are (`Engine`), how one model runs on some of them (`Session`), and what happens within a step
of a model (`Probe`, for `verify`).

The contract is a post-condition: with a session open, one step over all devices equals that step
on one device. The conformance suite tests it. The variables have their values whenever code of
the user runs but a hook of a callback between two steps, which reads them after `Session.sync`.
An engine refuses what it cannot do in words, before anything changes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lockstep.core.devices import Device
from lockstep.core.environment import Place
from lockstep.core.layout import Layout
from lockstep.errors import BusyModel, UnsupportedBackend

Methods = dict[str, Callable[..., Any]]
"""Methods of a model by name."""

Guard = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Wraps a method, given its name: one thread at a time is in a call of the model.

A method that runs steps runs in `Session.call`.
"""

Execute = Callable[[Iterator[Any], int], Any]
"""Runs so many steps, or fewer if the batches end first, and returns the outputs."""

NO_BATCH: dict[str, Any] = {}
"""The outputs of an epoch without a step."""


@dataclass(frozen=True)
class Kind:
    """Describe training, evaluation or prediction.

    Attributes:
        name: The kind of batch, as in the names of hooks.
        phase: What the process does, for `lockstep run`.
        function: The model attribute that holds the step function.
        stop: The model attribute that stops the loop when a callback sets it.
    """

    name: str
    phase: str
    function: str
    stop: str

    def function_of(self, model: Any) -> Any:
        """Return the step function of a model.

        Raises:
            BusyModel: If a callback compiled the model, which removes its step functions.
        """
        function = getattr(model, self.function)
        if function is None:
            raise BusyModel(
                f"{model.name!r} has no {self.function} while it is {self.phase}: a callback "
                "called compile, which removed the function.\nCompile before or after the call, "
                f"or call model.make_{self.function}() after compile."
            )
        return function


TRAIN = Kind("train", "training", "train_function", "stop_training")
TEST = Kind("test", "evaluating", "test_function", "stop_evaluating")
PREDICT = Kind("predict", "predicting", "predict_function", "stop_predicting")
KINDS = (TRAIN, TEST, PREDICT)


@dataclass(frozen=True)
class Home:
    """Where a variable is.

    Attributes:
        place: Equal places mean the same devices.
        shards: In how many shards it is; 1 if each device has it whole.
    """

    place: Any
    shards: int = 1


@dataclass(frozen=True)
class Snapshot:
    """The variables of a model between two steps.

    Attributes:
        variables: Number of arrays that are variables; the rest are logs.
        arrays: The name, dtype and shape of each array.
        values: The values in the same order, fetched to the host one at a time. Any thread may
            consume the iterator once, while training continues.
    """

    variables: int
    arrays: list[tuple[str, str, tuple[int, ...]]]
    values: Iterator[np.ndarray]


class Engine(ABC):
    """Runs Keras models of one backend on several devices."""

    name: str
    """The name of the Keras backend."""

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
    def session(self, model: Any, layout: Layout) -> "Session":
        """Return a session of `model` on its devices; nothing changes until it is opened.

        Args:
            model: A Keras model, which may be on other devices now.
            layout: How it is laid out on its devices.

        Raises:
            LayoutConflict: If another tool has laid it out, or it shares variables with a model
                on other devices.
            UnsupportedBackend: If the engine, or its mode, cannot.
            UnsupportedModel: If this model cannot.
        """

    def made_in_shards(self, devices: tuple[str, ...]) -> AbstractContextManager[None]:
        """Shard each large variable that is made inside the context.

        Raises:
            UnsupportedBackend: If variables cannot be sharded.
        """
        raise self._without_shards()

    def sharded_dims(self, model: Any, devices: int) -> dict[int, int | None]:
        """Return the dim along which each variable would be sharded, by `id`.

        It is `None` for a variable that each device has whole, such as one that is not in the dict.

        Raises:
            UnsupportedBackend: If variables cannot be sharded.
        """
        raise self._without_shards()

    def _without_shards(self) -> UnsupportedBackend:
        return UnsupportedBackend(
            f'state="sharded" was requested, but {self.name!r} supports only '
            'state="replicated".\nRemove state="sharded".'
        )

    @abstractmethod
    def probe(self, model: Any) -> "Probe":
        """Return a probe for the steps of `model`, attached or not."""


class Session(ABC):
    """One model on its devices.

    Args:
        model: The model.
        layout: How the model is laid out on its devices.

    Attributes:
        model: The model.
        layout: How it is laid out on its devices.
        devices: The names of its devices.
    """

    def __init__(self, model: Any, layout: Layout) -> None:
        self.model = model
        self.layout = layout
        self.devices = layout.devices

    # ------------------------------------------------------------ on and off the devices

    @abstractmethod
    def open(self) -> None:
        """Lay out the variables on the devices."""

    @abstractmethod
    def close(self) -> None:
        """Undo `open`, even if it failed halfway."""

    @abstractmethod
    def home(self, variable: Any) -> Home:
        """Return where a variable of the model is."""

    def methods(self, methods: Methods, guarded: Guard) -> Methods:
        """Return all methods to replace on the model, by name.

        Args:
            methods: Those of all engines.
            guarded: Wraps a method that this session adds and that calls the model.
        """
        return methods

    # ------------------------------------------------------------ in a call

    def call(self, name: str) -> AbstractContextManager[object]:
        """Run a method of the model inside the context; the variables have values at its end.

        Args:
            name: The name of the method, such as `"fit"` or `"train_on_batch"`.
        """
        return nullcontext()

    @abstractmethod
    def step_function(self, kind: Kind, force: bool) -> Any:
        """Return the step function of the model in Keras's protocol, or a new one.

        Variables that are new are laid out before.

        Args:
            kind: The kind of steps.
            force: Whether to make one, although the model has one.

        Raises:
            UnsupportedModel: If the model was compiled in a way that excludes these devices.
        """

    @abstractmethod
    def batches(self, kind: Kind, *, recorded: bool = False, **data: Any) -> Any:
        """Return Keras's iterator over the epochs of these data.

        Args:
            kind: The kind of steps that take the batches.
            recorded: Whether the iterator knows its position, for a checkpoint or for predictions
                that go into a file.
            data: The arguments of Keras's `EpochIterator`.
        """

    @abstractmethod
    def build(self, batches: Any, kind: Kind) -> None:
        """Build what the first step needs, and reset the iterator as Keras does."""

    @abstractmethod
    def epoch(self, kind: Kind, batches: Any, callbacks: Any) -> AbstractContextManager[Execute]:
        """Run the steps of one epoch inside the context, by the function that it gives.

        However the context ends, the variables have the state before a step or after it.

        Args:
            kind: The kind of steps.
            batches: The iterator over the batches.
            callbacks: Keras's list of callbacks, whose hooks run between steps.
        """

    def sync(self) -> None:  # noqa: B027 - variables may hold the state
        """Write the state of a running epoch into the variables."""

    @abstractmethod
    def snapshot(self, logs: dict[str, Any], *, writes: bool) -> Snapshot | None:
        """Copy every variable, then the logs of the last step, between two steps of a `fit`.

        Training waits only until the copies are enqueued.

        Args:
            logs: The logs.
            writes: Whether this process writes the snapshot. Another one takes part in it, where
                each has a part of the variables.

        Returns:
            The copies, `None` if another process writes.
        """

    # ------------------------------------------------------------ in words

    def is_compiled(self) -> bool:
        """Return whether the first call of a step function compiles it."""
        return not self.model.run_eagerly

    def first_work(self, kind: Kind, steps: int) -> str | None:
        """Return what the next step waits for, as a noun; `None` if that takes no time.

        Args:
            kind: The kind of step.
            steps: The number of steps that its function has run.
        """
        waits = steps == 0 and self.is_compiled()
        return "reading its batch and compiling the step" if waits else None

    def remarks(self) -> str:
        """Return the end of the line that `fit` prints."""
        return ""


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

    def precise(self) -> AbstractContextManager[list[str]]:
        """Compute matrix products in the full precision of their type inside the context.

        Several processes draw the random numbers of the first one. The context gives a list, in
        which `train` keeps what a report is to say about how the steps since a restart ran.
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

    def recorded(
        self, batches: Iterable[Any], *, layers: bool = True
    ) -> Generator[list[dict[str, np.ndarray]], None, None]:
        """Yield the sketches of what each replica computes of each batch.

        They are of the outputs of layers, those inside nested models too, and of gradients; see
        `engines/replicas/sketches.py`. A batch does not change the model, and its random numbers
        are those of the first step. The caller may assign values between two batches.

        Args:
            batches: Batches in the structure that `fit` passes to a training step.
            layers: Whether the outputs of layers are wanted.
        """
        ...
