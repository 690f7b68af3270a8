"""One `fit` on JAX, as a checkpoint sees it: its state is read and set between two steps."""

import warnings
from copy import deepcopy
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep.engines import callback_states
from lockstep.engines.jax.checkpoints.copies import Copies
from lockstep.engines.jax.checkpoints.data import fingerprint, put_states
from lockstep.engines.jax.checkpoints.position import RecordedIterator, RecordedValidation
from lockstep.engines.jax.several import processes
from lockstep.engines.jax.several.facts import compiled_of, config_of
from lockstep.engines.jax.steps.epoch import TRAIN
from lockstep.engines.named_variables import named_variables
from lockstep.engines.recording import Recorder, Snapshot
from lockstep.errors import CheckpointWarning


class Recording:
    """One call of `fit` that is recorded; see `lockstep.engines.recording.Run`.

    Attributes:
        model: The model.
        devices: The names of its devices.
        epochs: Where the run ends.
    """

    def __init__(
        self,
        model: Any,
        devices: tuple[str, ...],
        batches: RecordedIterator,
        held_out: RecordedValidation | None,
        callbacks: list[Any],
        epochs: int,
    ) -> None:
        self.model = model
        self.devices = devices
        self.epochs = epochs
        self._batches = batches
        self._held_out = held_out
        self._callbacks = [each for each in callbacks if not isinstance(each, Recorder)]
        self._copies = Copies(on_host=devices[0].startswith("cpu"))
        self._logs: dict[str, Any] = {}
        self._within: tuple[list[np.ndarray], Any] | None = None
        self._rates = _rates(named_variables(model), self._values())

    def facts(self) -> dict[str, Any]:
        """What has to be the same for a run to go on: model, optimizer, data."""
        return {
            "model": config_of(self.model),
            "compiled": compiled_of(self.model),
            "data": fingerprint(self._batches),
        }

    def variables(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """The name, type and shape of every variable, in the order of a snapshot."""
        values = zip(named_variables(self.model), self._values(), strict=True)
        return [(name, str(value.dtype), tuple(value.shape)) for (name, _), value in values]

    def snapshot(self, logs: dict[str, Any]) -> Snapshot:
        """A copy of every variable; what it takes is told in `copies.py`."""
        names = [name for name, _ in named_variables(self.model)]
        values = [_on_one_device(value) for value in self._values()]
        variables = len(values)
        # Past the fetching that a look at them would cost; a step gives its logs to keep.
        for name, value in dict.items(logs):
            if isinstance(value, (str, bytes)) or value is None:  # which a callback has put there
                continue
            names.append(f"logs/{name}")
            values.append(jnp.asarray(value))
        arrays = [
            (name, str(value.dtype), tuple(value.shape))
            for name, value in zip(names, values, strict=True)
        ]
        return Snapshot(variables, arrays, self._copies.of(names, values))

    def state(self, step: int) -> dict[str, Any]:
        """Whatever else the run has changed, after so many steps of its epoch."""
        return {
            "position": self._batches.position(step),
            "validation": self._held_out.position() if self._held_out is not None else None,
            "callbacks": callback_states.states_of(self._callbacks),
            "stopped": bool(self.model.stop_training),
            "rates": self._rates,
        }

    def restore(self, epoch: int, step: int, values: list[np.ndarray], state: Any) -> list[str]:
        """Let `fit` go on where `snapshot` and `state` were taken."""
        self._logs = state["logs"] if step else {}
        self._say_other_rate(values, state)
        # Who takes a state may keep it and change it, and within an epoch it is put twice.
        words = self._put(values, deepcopy(state["callbacks"]) if step else state["callbacks"])
        if state["stopped"] or epoch >= self.epochs:
            # What the script does next draws what it would have drawn after the last epoch.
            put_states(self._batches.data_adapter, state["position"]["now"])
        else:
            if self._held_out is not None and state["validation"] is not None:
                self._held_out.begin_at(state["validation"])
            self._batches.begin_at(state["position"])
            if step:  # once more when the epoch has begun, which resets metrics
                self._within = (values, state["callbacks"])
        return words

    def _say_other_rate(self, values: list[np.ndarray], state: Any) -> None:
        """Tell of a rate that was compiled and is not the one that goes on; keep the first one."""
        here, now = self._rates, _rates(named_variables(self.model), values)
        self._rates = state.get("rates", here)
        # Where `fit` is called again on the same model, its rate is where the run has left it.
        if here not in (self._rates, now):
            warnings.warn(
                f"The learning rate is {_words(here)} here, and the run was compiled with "
                f"{_words(self._rates)}: its own rate, {_words(now)} by now, goes on.\nTo train "
                "with another one, start anew in another folder, or assign it in a callback.",
                CheckpointWarning,
                stacklevel=2,
            )

    def epoch_began(self) -> None:
        """Where the run goes on within an epoch, take back what its beginning has changed."""
        within, self._within = self._within, None
        if within is not None:
            self.model.jax_state_sync()
            self._put(*within)

    def logs_of(self, logs: Any) -> Any:
        """The logs of an epoch's last step, also where the checkpoint came right after it."""
        mine, self._logs = self._logs, {}
        return mine if mine and not logs else logs

    def is_told_to_leave(self) -> bool:
        """Whether one of several processes was sent SIGTERM, and all are at the agreed step."""
        return processes.is_told_to_leave()

    def wait_for_others(self) -> None:
        """Return when every process has come here."""
        processes.wait_for_all()

    def save_model(self, path: str, values: list[np.ndarray] | None) -> None:
        """Write a plain `.keras` file, of other values than the model has if some are given."""
        variables = [variable for _, variable in named_variables(self.model)]
        own = [variable.value for variable in variables]
        try:
            for variable, value in zip(variables, values or own, strict=True):
                variable.assign(value)
            self.model.save(path)
        finally:
            for variable, value in zip(variables, own, strict=True):
                variable.assign(value)

    def _put(self, values: list[np.ndarray], states: list[dict[str, Any]]) -> list[str]:
        for (_, variable), value in zip(named_variables(self.model), values, strict=True):
            variable.assign(value)
        _renew(self.model)
        return callback_states.put_states(self._callbacks, states)

    def _values(self) -> list[Any]:
        # keras/src/backend/jax/trainer.py, JAXTrainer: within an epoch the state is in
        # `_jax_state`, unless a callback has put it into the variables.
        attributes = vars(self.model)
        state = attributes.get("_jax_state")
        if state and not attributes.get("_jax_state_synced", True):
            return [value for name in TRAIN.state for value in state.get(name)]
        return [variable.value for _, variable in named_variables(self.model)]


def recorder_among(callbacks: Any) -> Recorder | None:
    """The recorder in what `fit` was given as callbacks."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    every = keras.tree.flatten(callbacks) if callbacks else []
    return next((each for each in every if isinstance(each, Recorder)), None)


def _on_one_device(value: Any) -> Any:
    value = processes.local(value)
    return value.addressable_data(0) if value.is_fully_replicated else value


def _rates(named: list[tuple[str, Any]], values: list[Any]) -> list[float]:
    """The learning rates among the values of variables; one that is a schedule is none."""
    # keras/src/optimizers/base_optimizer.py, BaseOptimizer.__init__: the name of the variable
    return [
        float(np.asarray(_on_one_device(value) if isinstance(value, jax.Array) else value))
        for (name, _), value in zip(named, values, strict=True)
        if name.startswith("optimizer/") and name.rstrip("'").endswith("learning_rate")
    ]


def _words(rates: list[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def _renew(model: Any) -> None:
    """Let layers compute with the variables that they have now.

    `Normalization` computes with copies, which a program that is traced has as constants.
    """
    # keras/src/layers/preprocessing/normalization.py, Normalization.finalize_state
    renewed = False
    for layer in model._flatten_layers():
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
