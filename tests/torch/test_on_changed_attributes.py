"""Attributes that code of one process changes between two steps, or that a step itself changes.

No callback of the user's is there, after which lockstep compares the processes anyway.
"""

from functools import partial

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

from tests.agreement import assert_equal, both
from tests.tiers import further

X = np.random.default_rng(0).normal(size=(20, 4))
Y = np.random.default_rng(1).normal(size=(20, 2))
UNSPLIT = pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")


class Options:
    """What a layer is told to do, in an object of its own."""

    mixes = False


class Center(layers.Layer):
    """Scales its inputs, and takes their mean over the rows away if it is told to."""

    def __init__(self, **options):
        super().__init__(**options)
        self.scale, self.mixes, self.options = 1.0, False, Options()

    def call(self, inputs):
        if self.mixes or self.options.mixes:
            inputs = inputs - ops.mean(inputs, axis=0, keepdims=True)
        return inputs * self.scale


class Error(keras.losses.Loss):
    """The squared error, times a weight that somebody may change."""

    weight = 1.0

    def call(self, y_true, y_pred):
        return self.weight * ops.mean(ops.square(y_true - y_pred), axis=-1)


class Anneal(keras.metrics.Mean):
    """Halves the weight of a loss at each step."""

    def __init__(self, loss):
        super().__init__(name="anneal")
        self.loss = [loss]

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.loss[0].weight *= 0.5
        return super().update_state(y_true)


class Batches(keras.utils.PyDataset):
    """Changes a layer, the loss and the optimizer of a model whenever it is asked for a batch."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def __len__(self):
        return 5

    def __getitem__(self, index):
        self.model.get_layer("center").scale = 1.0 + index
        self.model.loss.weight = 2.0 + index
        self.model.optimizer.clipnorm = 1.0 / (1 + index)
        return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]


class Annealed(keras.Model):
    """Its loss has a part that grows with the steps, as that of a variational model may."""

    beta = 0.0

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.beta += 0.2
        return super().compute_metrics(x, y, y_pred, sample_weight)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred) + self.beta * ops.mean(ops.square(y_pred))


class MixesLater(keras.Model):
    """From the third step on, a layer looks across the rows."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.get_layer("center").mixes = int(self.optimizer.iterations) >= 2
        return super().compute_loss(x, y, y_pred)


class MixesLaterInItsStep(keras.Model):
    """The same, by an object that the layer holds, in a step of its own."""

    def train_step(self, data):
        x, y = data
        self.get_layer("center").options.mixes = int(self.optimizer.iterations) >= 2
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        loss.backward()
        weights = self.trainable_weights
        self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": loss}


def model(cls=keras.Model, metric=False):
    inputs = keras.Input((4,))
    hidden = Center(name="center")(layers.Dense(4)(inputs))
    made, loss = cls(inputs, layers.Dense(2)(hidden)), Error()
    made.compile(keras.optimizers.SGD(0.05), loss, metrics=[Anneal(loss)] if metric else None)
    return made


def assert_trained_alike(build, fit):
    one, many = both(build)
    assert_equal(fit(one).history, fit(many).history)
    assert_equal(one, many)


def fit_arrays(made):
    return made.fit(X, Y, batch_size=4, shuffle=False, verbose=0)


def test_data_that_change_a_layer_the_loss_and_the_optimizer():
    assert_trained_alike(model, lambda made: made.fit(Batches(made), shuffle=False, verbose=0))


def test_a_metric_that_changes_the_loss():
    assert_trained_alike(lambda: model(metric=True), fit_arrays)


def test_compute_metrics_that_changes_what_compute_loss_reads():
    assert_trained_alike(lambda: model(Annealed), fit_arrays)


@UNSPLIT
@pytest.mark.parametrize("cls", [MixesLater, MixesLaterInItsStep])
def test_a_layer_that_looks_across_the_rows_from_the_third_step_on(cls):
    assert_trained_alike(lambda: model(cls), fit_arrays)


class Counts(layers.Layer):
    """Scales by the number of its calls, which it keeps in a number or in a list."""

    def __init__(self, start, **options):
        super().__init__(**options)
        self.start, self.calls = start, start()

    def call(self, inputs):
        if self.start is int:
            self.calls += 1
            return inputs * (1 + 0.1 * self.calls)
        self.calls.append(1)
        return inputs * (1 + 0.1 * len(self.calls))


class CountingError(keras.losses.Loss):
    """The squared error, times the number of its calls since somebody has set it back."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def call(self, y_true, y_pred):
        self.calls.append(1)
        return len(self.calls) * ops.mean(ops.square(y_true - y_pred), axis=-1)


class ListOfErrors(keras.metrics.Metric):
    """Keeps its errors in a list, and draws a number of PyTorch for each."""

    def __init__(self):
        super().__init__(name="errors")
        self.errors = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.mean(ops.abs(y_true - ops.stop_gradient(y_pred)))
        self.errors.append(float(error) * (1 + 0.1 * float(torch.rand(()))))

    def result(self):
        return sum(self.errors)

    def reset_state(self):
        self.errors.clear()


class ReadsErrors(keras.Sequential):
    """Weights its loss by a metric of `compile`."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        read = self.get_metrics_result().get("errors", 0.0)
        return super().compute_loss(x, y, y_pred, sample_weight) * (1 + 0.1 * read)


def reset_at_each_epoch(part, start):
    def reset(epoch, logs=None):
        part.calls = start()

    return [keras.callbacks.LambdaCallback(on_epoch_begin=reset)]


def counted(start):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), Counts(start), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model, reset_at_each_epoch(model.layers[1], start)


def counting_loss():
    loss = CountingError()
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model, reset_at_each_epoch(loss, list)


def list_of_errors():
    model = ReadsErrors([keras.Input((4,)), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[ListOfErrors()])
    return model, []  # Keras resets the metric at each epoch


@UNSPLIT
@pytest.mark.parametrize(
    "build",
    [partial(counted, int), counting_loss, list_of_errors, *further(partial(counted, list))],
    ids=["number", "loss", "metric", "list"],
)
def test_what_steps_have_changed_and_an_epoch_sets_back_is_set_back_everywhere(build):
    """What is set back is what the processes were sent, so that the model seemed to be the same."""
    callbacks = []

    def made():
        model, each = build()
        callbacks.append(each)
        return model

    models = both(made)
    found = []
    for model, each in zip(models, callbacks, strict=True):
        keras.utils.set_random_seed(3)
        options = {"batch_size": 6, "epochs": 3, "shuffle": False, "verbose": 0}
        found.append(model.fit(X, Y, callbacks=each, **options).history)
    assert_equal(*found)
    assert_equal(*models)
