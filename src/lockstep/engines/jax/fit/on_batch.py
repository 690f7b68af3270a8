"""`train_on_batch`, `test_on_batch` and `predict_on_batch` on a mesh."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from keras.src.backend.jax.trainer import JAXTrainer
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights
from keras.src.utils.python_utils import pythonify_logs

from lockstep.engines.jax.fit.own import is_keras, knows_arguments
from lockstep.engines.jax.on_devices.arrays import host_array
from lockstep.engines.jax.steps.epoch import PREDICT, TEST, TRAIN, Current, Kind
from lockstep.engines.jax.steps.step import StepFunction

# Everything private below is what JAXTrainer itself goes by, and has its place in
# keras/src/trainers/trainer.py or keras/src/backend/jax/trainer.py (`_jax_state`).


class OnBatch:
    """The methods of one model that take one batch.

    What they do is what Keras does, which puts each batch on the first device, twice. Here a
    batch goes from the host to the devices that need its rows.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Those that can stand in for the ones of the model: of a class's own, none can."""
        mine = {name: getattr(self, name) for name in _NAMES}
        return {
            name: method
            for name, method in mine.items()
            if is_keras(self.model, name) and knows_arguments(getattr(OnBatch, name), name)
        }

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Keras's `train_on_batch`."""
        model = self.model
        model._assert_compile_called("train_on_batch")
        if class_weight is not None:
            if sample_weight is not None:  # which Keras refuses, in words of its own
                return JAXTrainer.train_on_batch(model, x, y, sample_weight, class_weight)
            sample_weight = class_weight_to_sample_weights(y, class_weight)
        batch = _as_jax_has_it((x, y, sample_weight))
        model._symbolic_build(data_batch=batch)
        model.make_train_function()
        model.reset_metrics()
        return self._logs(self._step(TRAIN, batch), return_dict)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Keras's `test_on_batch`."""
        model = self.model
        model._assert_compile_called("test_on_batch")
        batch = _as_jax_has_it((x, y, sample_weight))
        model._symbolic_build(data_batch=batch)
        model.make_test_function()
        model.reset_metrics()
        return self._logs(self._step(TEST, batch), return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Keras's `predict_on_batch`."""
        model = self.model
        if not all(layer.built for layer in model._flatten_layers()):
            with keras.StatelessScope():
                model(x)
        model.make_predict_function()
        return keras.tree.map_structure(np.array, self._step(PREDICT, (x,)))

    def _step(self, kind: Kind, batch: Any) -> Any:
        """One step; its outputs."""
        model, attributes = self.model, vars(self.model)
        step, batches = getattr(model, kind.function), iter((batch,))
        current = Current(kind.state)
        state = model._get_jax_state(**dict.fromkeys(kind.state, True))
        current.kept.append((None, state))
        attributes["_jax_state"], attributes["_jax_state_synced"] = current, False
        try:
            if isinstance(step, StepFunction):
                outputs = step.steps(current.kept, batches)
            else:  # which somebody has put around it
                current.kept.extend(map(step, (state,), (batches,)))
                del current.kept[0]
                outputs = current.kept[0][0]
        finally:  # after an interrupt, too
            after = current.kept[-1][1]
            if any(map(_differ, state, after)):
                model.jax_state_sync()
            attributes["_jax_state"], attributes["_jax_state_synced"] = None, True
        # A device may read the rows in place, which belong to the caller again after this.
        jax.block_until_ready(current.kept)
        return outputs

    def _logs(self, logs: Any, return_dict: bool) -> Any:
        logs = pythonify_logs(logs)
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)


_NO_NUMBERS = "OSUMm"  # objects, words and times: numpy.dtype.kind
_NAMES = ("train_on_batch", "test_on_batch", "predict_on_batch")


def _differ(before: list[Any], after: list[Any]) -> bool:
    """Whether variables are to get other arrays than they have."""
    return any(map(operator.is_not, before, after)) or len(before) != len(after)


def _as_jax_has_it(batch: Any) -> Any:
    """The batch with arrays of the host where they are, in types that JAX has.

    Anything else becomes an array of JAX's, or is refused by it, as Keras has it.
    """

    def converted(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind in _NO_NUMBERS:
            return jax.device_put(leaf)
        array = host_array(leaf)
        return array.astype(jax.typeof(array).dtype, copy=False)

    return keras.tree.map_structure(converted, batch)
