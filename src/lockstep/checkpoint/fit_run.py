"""Read and restore the state of a running `fit` between two steps."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import keras
import numpy as np

from lockstep.checkpoint import callback_states
from lockstep.checkpoint.data_states import fingerprint, is_of_as_many, put_states
from lockstep.checkpoint.fingerprint import compiled_of, config_of, is_rate
from lockstep.core.engine import Session
from lockstep.core.state import named_variables, renew_normalization
from lockstep.processes.group import current
from lockstep.processes.own_rows import OwnRows


class Observer:
    """What observes a `fit` between its steps; this one does nothing.

    The steps are observed by a callback, the last one of the list.
    """

    records = False
    """Whether it needs the position in the data."""

    def begin(self, fit: "Callable[[], FitRun]", epoch: int) -> int:
        """Observe a `fit` after `on_train_begin`; return the epoch to begin with."""
        return epoch

    def epoch(self, logs: Any) -> Any:
        """Return the logs of the last step of an epoch."""
        return logs

    def end(self, error: Exception) -> None:
        """Observe an error that ends the epochs, while the state is in place."""


NO_OBSERVER = Observer()


class FitRun:
    """One call of `fit`, observed between two steps.

    Attributes:
        model: The model.
        devices: The names of its devices.
        epochs: The epoch at which the run ends.
        adapter: Keras's adapter of the training data.
        session: The model on its devices.
        is_spread: Whether each of several processes has a part of the variables.
        has_own_rows: Whether each has its own rows. Then all report the position of their data.
    """

    def __init__(
        self,
        session: Session,
        batches: Any,
        held_out: Any,
        callbacks: list[Any],
        epochs: int,
    ) -> None:
        """Start to record.

        Args:
            session: The model on its devices.
            batches: The training batches, a `TrainingPosition`.
            held_out: The validation batches, a `ValidationPosition`, or `None`.
            callbacks: All callbacks except the checkpoint.
            epochs: The epoch at which the run ends.
        """
        self.session = session
        self.model = session.model
        self.devices = session.devices
        self.is_spread = current().size > 1 and session.layout.is_sharded
        self.epochs = epochs
        self.adapter = batches.data_adapter
        of_validation = None if held_out is None else held_out.data_adapter
        self.has_own_rows = any(isinstance(a, OwnRows) for a in (self.adapter, of_validation))
        self._batches = batches
        self._held_out = held_out
        self._callbacks = callbacks
        self._logs: dict[str, Any] = {}
        self._within: tuple[list[np.ndarray], Any] | None = None

    def facts(self) -> dict[str, Any]:
        """Return the configurations that a resumed run must share: model, optimizer and data."""
        return {
            "model": config_of(self.model),
            "compiled": compiled_of(self.model),
            "data": fingerprint(self._batches),
        }

    def variables(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return the name, dtype and shape of every variable, in snapshot order."""
        kind = keras.backend.standardize_dtype

        def described(name: str, value: Any) -> tuple[str, str, tuple[int, ...]]:
            return name, kind(value.dtype), tuple(value.shape)

        # One by one: a value that is in parts is whole for this time alone.
        return [described(name, each.value) for name, each in named_variables(self.model).items()]

    def state(self, step: int) -> dict[str, Any]:
        """Return all other state of the run after `step` steps of the epoch."""
        return {
            "position": self._batches.position(step),
            "validation": self._held_out.position() if self._held_out is not None else None,
            "callbacks": callback_states.states_of(self._callbacks),
            "stopped": bool(self.model.stop_training),
        }

    def rates(self) -> list[np.ndarray]:
        """Return the value of every variable that is a learning rate, in snapshot order."""
        named = named_variables(self.model).items()
        return [current().to_host(each.value) for name, each in named if is_rate(name)]

    def is_of_as_many(self, state: Any) -> bool:
        """Return whether the data of a state were those of as many processes."""
        return is_of_as_many(self.adapter, state["position"]["now"])

    def restore(self, epoch: int, step: int, values: list[np.ndarray], state: Any) -> list[str]:
        """Restore a snapshot and a state; return remarks on callbacks that differ."""
        self._logs = state["logs"] if step else {}
        # Within an epoch the state is set twice, and a callback may change the object it gets.
        words = self._put(values, deepcopy(state["callbacks"]) if step else state["callbacks"])
        if state["stopped"] or epoch >= self.epochs:
            # Later code in the script draws the same random numbers as after the last epoch.
            put_states(self._batches.data_adapter, state["position"]["now"])
        else:
            if self._held_out is not None and state["validation"] is not None:
                self._held_out.begin_at(state["validation"])
            self._batches.begin_at(state["position"])
            if step:  # set again after the epoch begins, because its beginning resets metrics
                self._within = (values, state["callbacks"])
        return words

    def epoch_began(self) -> None:
        """Undo the changes of the epoch's beginning if the run resumes within the epoch."""
        within, self._within = self._within, None
        if within is not None:
            self.session.sync()
            self._put(*within)

    def logs_of(self, logs: Any) -> Any:
        """Return the logs of an epoch's last step, also if the checkpoint is right after it."""
        mine, self._logs = self._logs, {}
        return mine if mine and not logs else logs

    def _put(self, values: list[np.ndarray], states: list[dict[str, Any]]) -> list[str]:
        for variable, value in zip(named_variables(self.model).values(), values, strict=True):
            variable.assign(value)
        renew_normalization(self.model)
        return callback_states.put_states(self._callbacks, states)
