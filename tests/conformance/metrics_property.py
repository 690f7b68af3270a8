"""Models whose `metrics` property is their own, as on keras.io; for every backend."""

import keras
import numpy as np
from keras import layers, ops

import lockstep
from tests.conformance.common import assert_same

ROWS, BATCH = 53, 7


class Counting(layers.Dense):
    """Counts rows in a metric of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rows = keras.metrics.Sum(name="rows")

    def call(self, x):
        self.rows.update_state(ops.sum(ops.ones_like(x[:, 0])))
        return super().call(x)


class OwnLoss(keras.Model):
    """Computes its loss itself, and names one metric that is updated there."""

    hidden_layer = layers.Dense

    def __init__(self):
        super().__init__()
        self.hidden = self.hidden_layer(6, activation="tanh")
        self.last = layers.Dense(1)

    def call(self, x):
        return self.last(self.hidden(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = ops.mean(ops.square(y_pred - y))
        self.error.update_state(ops.mean(ops.abs(y_pred - y)))
        return loss

    @property
    def metrics(self):
        return [self.error]


class MadeInCompile(OwnLoss):
    """As keras.io's DCGAN: `compile` makes the metric that the property names."""

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.error = keras.metrics.Mean(name="error")


class WithoutLossTracker(OwnLoss):
    """The property leaves out Keras's own loss tracker, which its training step updates."""

    def __init__(self):
        super().__init__()
        self.error = keras.metrics.Mean(name="error")


class WithoutCompiledMetrics(WithoutLossTracker):
    """The property leaves out the metrics given to `compile`, too, and one of a layer."""

    hidden_layer = Counting

    def compile(self, *args, **kwargs):
        super().compile(*args, metrics=["mae"], **kwargs)


def run(cls, distribute=None, *, before_compile=False):
    """Everything that a training leaves; `distribute` None is stock Keras on one device."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    model = cls()
    if distribute is not None and before_compile:
        distribute(model)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    if distribute is not None and not before_compile:
        distribute(model)
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(ROWS, width)).astype("float32") for width in (4, 1))
    options = {"batch_size": BATCH, "verbose": 0}
    history = model.fit(x, y, epochs=2, shuffle=False, validation_data=(x, y), **options).history
    evaluated = model.evaluate(x, y, return_dict=True, **options)
    # What the property leaves out: TensorFlow keeps it, and stock Keras on JAX drops it.
    left_out = float(model._loss_tracker.result())
    if distribute is not None:
        lockstep.release(model)
    variables = [*model.variables, *model.optimizer.variables]
    return history, evaluated, left_out, list(map(ops.convert_to_numpy, variables))


def assert_trains_as_on_one_device(cls, distribute, *, before_compile):
    many, one = run(cls, distribute, before_compile=before_compile), run(cls)
    assert many[0].keys() == one[0].keys()
    assert_same(many, one)
