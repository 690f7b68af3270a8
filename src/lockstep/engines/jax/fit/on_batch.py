"""`train_on_batch`, `test_on_batch` and `predict_on_batch` on a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from lockstep.core.engine import PREDICT, TEST, TRAIN, Kind
from lockstep.engines.jax.steps.execution import Execution
from lockstep.keras_compat import (
    build_from_batch,
    check_compiled,
    class_weight_to_sample_weights,
    is_built,
    trainer_class,
    values_in_order,
)
from lockstep.training.arrays import host_array
from lockstep.training.logs import pythonify_logs
from lockstep.training.overrides import is_keras, knows_arguments


class OnBatch:
    """Run the methods of one model that take one batch.

    They behave like Keras's methods. Keras puts each batch on the first device, twice. Here a batch
    goes from the host to the devices that need its rows.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return the methods that can replace the model's. Overridden methods are not replaced."""
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
        """Run Keras's `train_on_batch`."""
        model = self.model
        check_compiled(model, "train_on_batch")
        if class_weight is not None:
            if sample_weight is not None:  # Keras raises its own error
                keras_own = trainer_class().train_on_batch
                return keras_own(model, x, y, sample_weight, class_weight)
            sample_weight = class_weight_to_sample_weights(y, class_weight)
        logs = self.train((x, y, sample_weight))
        return logs if return_dict else values_in_order(model, logs)

    def train(self, batch: Any) -> dict[str, Any]:
        """Run one training step on a batch in the structure of `fit`, and return the logs."""
        model = self.model
        batch = _as_jax_has_it(batch)
        build_from_batch(model, batch)
        model.make_train_function()
        model.reset_metrics()
        logs: dict[str, Any] = pythonify_logs(self._step(TRAIN, batch))
        return logs

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Run Keras's `test_on_batch`."""
        model = self.model
        check_compiled(model, "test_on_batch")
        batch = _as_jax_has_it((x, y, sample_weight))
        build_from_batch(model, batch)
        model.make_test_function()
        model.reset_metrics()
        return self._logs(self._step(TEST, batch), return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Run Keras's `predict_on_batch`."""
        model = self.model
        if not is_built(model):
            with keras.StatelessScope():
                model(x)
        model.make_predict_function()
        return keras.tree.map_structure(np.array, self._step(PREDICT, (x,)))

    def _step(self, kind: Kind, batch: Any) -> Any:
        """Run one step and return its outputs."""
        execution = Execution(self.model, kind)
        with execution as step:
            outputs = step(iter((batch,)), 1)
        # A device may read the rows in place, and the caller may write into them after this.
        execution.wait()
        return outputs

    def _logs(self, logs: Any, return_dict: bool) -> Any:
        logs = pythonify_logs(logs)
        return logs if return_dict else values_in_order(self.model, logs)


_NO_NUMBERS = "OSUMm"  # objects, strings and times
_NAMES = ("train_on_batch", "test_on_batch", "predict_on_batch")


def _as_jax_has_it(batch: Any) -> Any:
    """Convert host arrays of a batch to dtypes of JAX, and keep them on the host.

    Every other leaf becomes a JAX array or raises JAX's error, as in Keras.
    """

    def converted(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind in _NO_NUMBERS:
            return jax.device_put(leaf)
        array = host_array(leaf)
        return array.astype(jax.typeof(array).dtype, copy=False)

    return keras.tree.map_structure(converted, batch)
