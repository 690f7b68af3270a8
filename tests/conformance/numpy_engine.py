"""An engine as an exercise: NumPy arithmetic on one device, for a model of one dense layer.

It has what an engine has to have, and nothing else. So it shows how much that is.
"""

import keras
import numpy as np

from lockstep.checkpoint.fit_run import FitState, Snapshot
from lockstep.devices import Device
from lockstep.engines.engine import Engine, no_shards
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import build_on_first_batch
from lockstep.state import named_variables
from lockstep.training.input import HostIterator
from lockstep.training.session import PREDICT, Session, recorded_type


class NumPyEngine(Engine):
    """Runs a dense layer with the mean squared error and SGD."""

    name = "numpy"

    def devices(self):
        return (Device("cpu:0", "NumPy"),)

    def rehearse(self, devices):
        raise NotImplementedError

    def join(self, place):
        return 0, 1

    def session(self, model, layout):
        return NumPySession(model, layout)

    def check_shards(self):
        raise no_shards("NumPy", "There is one device.", 'Leave out state="sharded".')

    def exchanged(self, values, source, target):
        return values, 2 * values

    def probe(self, model):
        raise NotImplementedError


class NumPySession(Session):
    """Holds the state in the variables of Keras."""

    array_type = np.ndarray

    def check(self):
        layers = [type(layer) for layer in self.model.layers]
        if layers != [keras.layers.Dense]:
            raise UnsupportedModel(f"{self.model.name!r} is not one dense layer.")

    def open(self):
        pass

    def close(self):
        pass

    def home(self, variable):
        return self.devices[0]

    def step_function(self, kind):
        step = getattr(self, f"_{kind.name}")

        def run(iterator):
            outputs = [step(*keras.utils.unpack_x_y_sample_weight(each)) for each in iterator]
            return np.concatenate(outputs) if kind is PREDICT else outputs[-1]

        return run

    def batches(self, kind, *, recorded=False, **data):
        return (recorded_type(kind, HostIterator) if recorded else HostIterator)(**data)

    def build(self, batches, kind):
        if kind is not PREDICT:
            build_on_first_batch(self.model, batches)
        batches.reset()

    def fit_state(self):
        return NumPyFitState(self.model)

    def is_compiled(self):
        return False

    def joined(self, every):
        return np.concatenate(every)

    def _predict(self, x, y=None, weights=None):
        kernel, bias = map(np.asarray, self.model.get_weights())
        return x @ kernel + bias

    def _test(self, x, y, weights):
        outputs = self._predict(x)
        loss_of_epoch = self.model.metrics[0]
        loss_of_epoch.update_state(np.mean((outputs - y) ** 2), sample_weight=len(x))
        return self.model.compute_metrics(x, y, outputs)

    def _train(self, x, y, weights):
        kernel, bias = self.model.trainable_variables
        optimizer = self.model.optimizer
        slope = 2 * (self._predict(x) - y) / y.size
        logs = self._test(x, y, weights)
        rate = float(optimizer.learning_rate)
        kernel.assign_sub(rate * x.T @ slope)
        bias.assign_sub(rate * slope.sum(0))
        optimizer.iterations.assign_add(1)
        return logs


class NumPyFitState(FitState):
    """Gives the variables to a checkpoint."""

    def __init__(self, model):
        self._model = model

    def snapshot(self, logs):
        found = {name: np.array(each) for name, each in named_variables(self._model).items()}
        arrays = [(name, str(each.dtype), each.shape) for name, each in found.items()]
        return Snapshot(len(arrays), arrays, iter(found.values()))

    def sync(self):
        pass
