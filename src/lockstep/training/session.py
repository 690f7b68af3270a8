"""What the loop needs of an engine: one model on its devices."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from lockstep.checkpoint.data_position import TrainingPosition, ValidationPosition
from lockstep.checkpoint.fit_run import FitState
from lockstep.errors import BusyModel
from lockstep.layout import Layout
from lockstep.training.call_guard import LOOPS, CallGuard
from lockstep.training.input import HostIterator


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
                "called compile, which removes it.\n"
                f"Compile before or after the call, or call model.make_{self.function}() after "
                "compile."
            )
        return function


TRAIN = Kind("train", "training", "train_function", "stop_training")
TEST = Kind("test", "evaluating", "test_function", "stop_evaluating")
PREDICT = Kind("predict", "predicting", "predict_function", "stop_predicting")
KINDS = (TRAIN, TEST, PREDICT)

NO_BATCH: dict[str, Any] = {}
"""The outputs of an epoch without a step."""

Execute = Callable[[Iterator[Any], int], Any]
"""Runs so many steps, or fewer if the batches end first, and returns the outputs."""


@functools.cache
def recorded_type(kind: Kind, iterator: type[HostIterator]) -> Any:
    """Return a subclass of an iterator that records the position in the data for a checkpoint."""
    position = TrainingPosition if kind is TRAIN else ValidationPosition
    return type(f"Recorded{iterator.__name__}", (position, iterator), {"recorded": True})


class Session:
    """One model on its devices.

    This class serves an engine whose variables hold the state between two steps. Another engine
    overrides `epoch` and the methods that move the state.

    Args:
        model: The model.
        layout: How the model is laid out on its devices.

    Attributes:
        model: The model.
        layout: How it is laid out on its devices.
        devices: The names of its devices.
        loops: The methods that lockstep's loop may replace.
        array_type: The type of the arrays that a step returns and that never change.
        iterator_type: The type of the iterators that `epoch` takes.
        finalizes_always: Whether Keras's `fit` on this backend also calls the optimizer's
            `finalize_variable_values` after an error.
    """

    array_type: type[Any]
    iterator_type: type[Any] = HostIterator
    finalizes_always = False
    loops: tuple[str, ...] = LOOPS

    def __init__(self, model: Any, layout: Layout) -> None:
        self.model = model
        self.layout = layout
        self.devices = layout.devices

    # ------------------------------------------------------------ on and off the devices

    def check(self) -> None:
        """Raise if the model cannot be on these devices; it may be on others now."""

    def open(self) -> None:
        """Lay out the variables on the devices."""
        raise NotImplementedError

    def close(self) -> None:
        """Undo `open`, even if it failed halfway."""
        raise NotImplementedError

    def adopt(self, first: bool) -> None:
        """Lay out variables that are new, before a step function is made or used again.

        Args:
            first: Whether there is no step function yet.
        """

    def home(self, variable: Any) -> Any:
        """Return where a variable of the model is; equal values mean the same devices."""
        raise NotImplementedError

    def shards(self, variable: Any) -> int:
        """Return the number of shards of a variable, 1 if each device has it whole."""
        return 1

    def step_function(self, kind: Kind) -> Any:
        """Make a step function in Keras's protocol.

        Raises:
            UnsupportedModel: If the model was compiled in a way that excludes these devices.
        """
        raise NotImplementedError

    def stepping(self, methods: dict[str, Any]) -> dict[str, Any]:
        """Return the methods of the model that run steps, by name, to be replaced on it."""
        return methods

    def methods(self, methods: dict[str, Any], turns: CallGuard) -> dict[str, Any]:
        """Return all methods to replace on the model, by name.

        Args:
            methods: Those of all engines.
            turns: The guard of the calls of the model.
        """
        return methods

    def reset(self, states: list[Any]) -> None:
        """Set states of RNN layers to zero."""
        for state in states:
            state.assign(np.zeros(state.shape, state.dtype))

    def not_compiled(self) -> list[Any]:
        """Return the layers that keep a step from being compiled where others are."""
        return []

    def remarks(self) -> str:
        """Return the end of the line that `fit` prints."""
        return ""

    # ------------------------------------------------------------ in a loop

    def batches(self, kind: Kind, *, recorded: bool = False, **data: Any) -> Any:
        """Return Keras's iterator over the epochs of these data.

        Args:
            kind: The kind of steps that take the batches.
            recorded: Whether a checkpoint records the position.
            data: The arguments of Keras's `EpochIterator`.
        """
        raise NotImplementedError

    def build(self, batches: Any, kind: Kind) -> None:
        """Build what the first step needs, and reset the iterator as Keras does."""
        raise NotImplementedError

    def fit_state(self) -> FitState:
        """Return access to the variables, for a checkpoint of one `fit`."""
        raise NotImplementedError

    def is_compiled(self) -> bool:
        """Return whether the first call of a step function compiles it."""
        return not self.model.run_eagerly

    def first_work(self) -> str | None:
        """Return what is done before a first step runs, as a noun; `None` if that takes no time."""
        return "reading its batch and compiling the step" if self.is_compiled() else None

    def is_ready(self, kind: Kind) -> bool:
        """Return whether the last step was the one that the next batches run."""
        return True

    def epoch(self, kind: Kind, batches: Any, callbacks: Any, run: Callable[[Execute], Any]) -> Any:
        """Run the steps of one epoch, and return what `run` returns.

        Args:
            kind: The kind of steps.
            batches: The iterator over the batches.
            callbacks: Keras's list of callbacks, whose hooks run between steps.
            run: Runs the steps, given the function for one execution.
        """
        return run(partial(self._execute, kind, batches))

    def _execute(self, kind: Kind, batches: Any, iterator: Iterator[Any], times: int) -> Any:
        if isinstance(batches, HostIterator):
            iterator = self._drawn(batches, iterator, times)
        return kind.function_of(self.model)(iterator)

    def _drawn(self, batches: HostIterator, iterator: Iterator[Any], times: int) -> Iterator[Any]:
        """Draw the batches of one execution.

        Raises:
            StopIteration: If no batch is left.
        """
        drawn = list(islice(iterator, times))
        if not drawn:
            raise StopIteration
        return iter(drawn)

    def sync(self) -> None:
        """Write the state of a running epoch into the variables."""

    def sync_metrics(self) -> None:
        """Write the state into the variables, and make metrics cheap to compute."""

    def clear(self) -> None:
        """Forget the state of the last epoch; the variables hold it."""

    def fetched(self, outputs: Any) -> Any:
        """Return predictions that later steps do not change."""
        return outputs

    def joined(self, every: list[Any]) -> Any:
        """Return all rows of the predictions of several steps, as NumPy arrays."""
        raise NotImplementedError
