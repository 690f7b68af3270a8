"""Read and restore the state of a running `fit` between two steps."""

import warnings
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np

from lockstep.checkpoint import callback_states
from lockstep.checkpoint.config_fingerprint import compiled_of, config_of
from lockstep.checkpoint.data_states import fingerprint, put_states
from lockstep.checkpoint.data_workers import drawn_elsewhere
from lockstep.errors import CheckpointWarning
from lockstep.keras_compat import is_default, layers_in
from lockstep.state import named_variables


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


class FitState(Protocol):
    """The variables of a model in a running `fit`; each engine implements it."""

    def snapshot(self, logs: dict[str, Any]) -> Snapshot:
        """Copy every variable, then the logs of the last step, between two steps.

        Training waits only until the copies are enqueued.
        """
        ...

    def sync(self) -> None:
        """Write the state of the running epoch to the variables."""
        ...


class Processes(Protocol):
    """The processes that run one `fit`; each engine implements it."""

    def several(self) -> bool:
        """Whether there is more than one."""
        ...

    def is_first(self) -> bool:
        """Whether this process writes files and prints."""
        ...

    def check_same_run(self, found: str | None) -> None:
        """Check that all processes resume from the same checkpoint.

        Raises:
            ProcessesDisagree: If the checkpoints differ.
        """
        ...

    def recorded_signals(self) -> tuple[int, ...]:
        """The signals that a checkpoint records in this process."""
        ...

    def agreed_to_stop(self, asked: bool) -> bool:
        """Whether a process received a signal to leave, and all are at the agreed step.

        Every process calls this once after each step. A single process gets `asked`.

        Args:
            asked: Whether this process has recorded a signal.
        """
        ...

    def any_asked(self, asked: bool) -> bool:
        """Whether any process has recorded a signal. Every process calls this after the last step.

        Args:
            asked: Whether this process has recorded one.
        """
        ...

    def wait_for_all(self) -> None:
        """Block until every process is here; return at once if there is only one."""
        ...


class FitRun:
    """One call of `fit`, observed between two steps.

    Attributes:
        model: The model.
        devices: The names of its devices.
        epochs: The epoch at which the run ends.
        adapter: Keras's adapter of the training data.
        fit_state: The variables, as the engine holds them.
        processes: The processes that run this `fit`.
    """

    def __init__(
        self,
        model: Any,
        devices: tuple[str, ...],
        batches: Any,
        held_out: Any,
        callbacks: list[Any],
        epochs: int,
        fit_state: FitState,
        processes: Processes,
    ) -> None:
        """Start to record.

        Args:
            model: The model.
            devices: The names of its devices.
            batches: The training batches, a `TrainingPosition`.
            held_out: The validation batches, a `ValidationPosition`, or `None`.
            callbacks: All callbacks except the checkpoint.
            epochs: The epoch at which the run ends.
            fit_state: The variables, as the engine holds them.
            processes: The processes that run this `fit`.
        """
        self.model = model
        self.devices = devices
        self.epochs = epochs
        self.adapter = batches.data_adapter
        self._batches = batches
        self._held_out = held_out
        self._callbacks = callbacks
        self.fit_state = fit_state
        self.processes = processes
        self._logs: dict[str, Any] = {}
        self._within: tuple[list[np.ndarray], Any] | None = None
        self._rates = _rates(named_variables(model), self._values())

    def facts(self) -> dict[str, Any]:
        """Return the configurations that a resumed run must share: model, optimizer and data."""
        return {
            "model": config_of(self.model),
            "compiled": compiled_of(self.model),
            "data": fingerprint(self._batches),
        }

    def variables(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return the name, dtype and shape of every variable, in snapshot order."""
        values = zip(named_variables(self.model), self._values(), strict=True)
        kind = keras.backend.standardize_dtype
        return [(name, kind(value.dtype), tuple(value.shape)) for name, value in values]

    def state(self, step: int) -> dict[str, Any]:
        """Return all other state of the run after `step` steps of the epoch."""
        return {
            "position": self._batches.position(step),
            "validation": self._held_out.position() if self._held_out is not None else None,
            "callbacks": callback_states.states_of(self._callbacks),
            "stopped": bool(self.model.stop_training),
            "rates": self._rates,
        }

    def restore(self, epoch: int, step: int, values: list[np.ndarray], state: Any) -> list[str]:
        """Restore a snapshot and a state; return remarks on callbacks that differ."""
        self._logs = state["logs"] if step else {}
        self._say_other_rate(values, state)
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

    def _say_other_rate(self, values: list[np.ndarray], state: Any) -> None:
        """Warn if the compiled learning rate differs from the resumed one; keep the run's first."""
        here, now = self._rates, _rates(named_variables(self.model), values)
        self._rates = state.get("rates", here)
        # In a second `fit` on the same model, the model has the rate at which the run ended.
        if here not in (self._rates, now):
            warnings.warn(
                f"The learning rate is {_words(here)} here, and the run was compiled with "
                f"{_words(self._rates)}: its own rate, {_words(now)} by now, goes on.\nTo train "
                "with another one, start anew in another folder, or assign it in a callback.",
                CheckpointWarning,
                stacklevel=2,
            )

    def epoch_began(self) -> None:
        """Undo the changes of the epoch's beginning if the run resumes within the epoch."""
        within, self._within = self._within, None
        if within is not None:
            self.fit_state.sync()
            self._put(*within)

    def logs_of(self, logs: Any) -> Any:
        """Return the logs of an epoch's last step, also if the checkpoint is right after it."""
        mine, self._logs = self._logs, {}
        return mine if mine and not logs else logs

    def is_between_steps(self, error: Exception) -> bool:
        """Whether state and position after an error are still those of the last step.

        That holds if drawing a batch failed, other processes make the batches, and no callback
        overrides a hook for the beginning of a batch.
        """
        drawing = error is self._batches.broke_off and drawn_elsewhere(self.adapter)
        hooks = ("on_train_batch_begin", "on_batch_begin")
        begins = [getattr(each, name, None) for each in self._callbacks for name in hooks]
        return drawing and all(map(is_default, begins))

    def save_model(self, path: str, values: list[np.ndarray] | None) -> None:
        """Write a plain `.keras` file with `values`, or with the model's own if `None`."""
        variables = list(named_variables(self.model).values())
        # TensorFlow and PyTorch assign in place.
        own = [keras.ops.copy(variable.value) for variable in variables]
        try:
            for variable, value in zip(variables, values or own, strict=True):
                variable.assign(value)
            self.model.save(path)
        finally:
            for variable, value in zip(variables, own, strict=True):
                variable.assign(value)

    def _put(self, values: list[np.ndarray], states: list[dict[str, Any]]) -> list[str]:
        for variable, value in zip(named_variables(self.model).values(), values, strict=True):
            variable.assign(value)
        _renew(self.model)
        return callback_states.put_states(self._callbacks, states)

    def _values(self) -> list[Any]:
        """Return the values of the variables before the first step."""
        return [variable.value for variable in named_variables(self.model).values()]


def _rates(names: Iterable[str], values: list[Any]) -> list[float]:
    """Return the learning rates among the variables; schedules are left out."""
    # keras/src/optimizers/base_optimizer.py, BaseOptimizer.__init__: the name of the variable
    return [
        float(keras.ops.convert_to_numpy(value))
        for name, value in zip(names, values, strict=True)
        if name.startswith("optimizer/") and name.rstrip("'").endswith("learning_rate")
    ]


def _words(rates: list[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def _renew(model: Any) -> None:
    """Recompute the values that layers derive from their variables.

    `Normalization` computes with copies, which are constants in a traced program.
    """
    # keras/src/layers/preprocessing/normalization.py, Normalization.finalize_state
    renewed = False
    for layer in layers_in(model):
        known = isinstance(layer, keras.layers.Normalization) and layer.built
        if known and layer.input_mean is None:
            before = [np.asarray(value) for value in (layer.mean, layer.variance)]
            layer.finalize_state()
            after = [np.asarray(value) for value in (layer.mean, layer.variance)]
            renewed |= not all(map(np.array_equal, before, after))
    if renewed:
        model.make_train_function(force=True)
        if model.test_function is not None:
            model.make_test_function(force=True)
        if model.predict_function is not None:
            model.make_predict_function(force=True)
