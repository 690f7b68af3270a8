"""Models and data that two processes on PyTorch train as one device does, one after the other.

python torch_cases.py FILE
"""

import sys
import warnings

import keras
import numpy as np
import torch
from keras import layers

import lockstep
import tests.torch.double  # noqa: F401  (double precision)

RANK, SIZE = lockstep.initialize()
QUIET = {"verbose": 0, "shuffle": False}


def made(*parts, optimizer=None, loss="mse", cls=keras.Sequential, **options):
    """A compiled model."""
    model = cls(list(parts))
    model.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), loss, **options)
    return lockstep.distribute(model) if SIZE > 1 else model


def data(rows=23, width=4):
    rng = np.random.default_rng(4)
    return rng.normal(size=(rows, width)), rng.normal(size=(rows, 2))


def dense(**options):
    return made(keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(2), **options)


def results(model, *more):
    slots = [each.value for each in model.optimizer.variables]
    return [*more, *model.get_weights(), *slots]


def a_model_that_predict_builds():
    model = made(layers.Dense(5, "tanh"), layers.Dense(2))
    x, y = data()
    predicted = model.predict(x, batch_size=9, verbose=0)
    return results(model, predicted, model.fit(x, y, **QUIET).history["loss"])


class AddsBuffer(layers.Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("added", torch.ones(3, dtype=torch.float64))

    def call(self, x):
        return x + self.added


def a_buffer_and_a_quantized_layer():
    model = dense()
    x, y = data()
    model.layers[0].quantize("int8")
    model.layers[0].enable_lora(2)
    model.compile("sgd", "mse")
    other = made(keras.Input((4,)), layers.Dense(3), AddsBuffer(), layers.Dense(2))
    losses = [each.fit(x, y, batch_size=7, **QUIET).history["loss"] for each in (model, other)]
    return results(other, *losses, *(each.value for each in model.trainable_variables))


def a_model_that_predict_on_batch_builds():
    model = made(layers.Dense(5, "tanh"), layers.Dense(2))
    x, y = data()
    return results(model, model.predict_on_batch(x), model.train_on_batch(x, y))


class OwnFit(keras.Sequential):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


def a_fit_of_its_own():
    model = made(keras.Input((4,)), layers.BatchNormalization(), layers.Dense(2), cls=OwnFit)
    x, y = data()
    history = model.fit(x, y, batch_size=7, epochs=2, validation_split=0.3, **QUIET).history
    return results(model, *history.values())


class CustomStep(keras.Sequential):
    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": loss}


def a_step_of_its_own():
    model = made(keras.Input((4,)), layers.Dense(3), layers.Dense(2), cls=CustomStep)
    x, y = data()
    return results(model, model.fit(x, y, batch_size=7, epochs=2, **QUIET).history["loss"])


def one_row_and_fewer_rows_than_processes():
    model = dense()
    x, y = data(5)
    history = model.fit(x, y, batch_size=2, **QUIET).history["loss"]
    return results(model, history, model.predict(x[:1], verbose=0), model.evaluate(x, y, 1, 0))


def weights_masks_and_metrics():
    model = made(
        keras.Input((5,), dtype="int32"),
        layers.Embedding(7, 4, mask_zero=True),
        layers.LSTM(3),
        layers.Dense(2),
        weighted_metrics=["mae", keras.metrics.AUC(name="auc")],
        loss="binary_crossentropy",
    )
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 7, (23, 5)), rng.integers(0, 2, (23, 2))
    history = model.fit(x, y, sample_weight=rng.random(23), batch_size=7, **QUIET).history
    return results(model, *history.values())


def accumulation_clipping_and_averages():
    optimizer = keras.optimizers.AdamW(
        0.01, global_clipnorm=0.5, gradient_accumulation_steps=2, use_ema=True
    )
    model = dense(optimizer=optimizer)
    x, y = data()
    return results(model, model.fit(x, y, batch_size=5, epochs=3, **QUIET).history["loss"])


def callbacks_that_decide():
    model = dense()
    x, y = data()
    callbacks = [
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0),
        keras.callbacks.EarlyStopping("val_loss", patience=3, min_delta=10.0),
    ]
    options = {"validation_data": (x, y), "callbacks": callbacks, **QUIET}
    history = model.fit(x, y, batch_size=7, epochs=9, **options).history
    return results(model, *history.values())


def a_loader_that_shuffles():
    model = dense()
    x, y = (torch.from_numpy(part) for part in data())
    rows = torch.utils.data.TensorDataset(x, y)
    keras.utils.set_random_seed(9 + RANK)
    loader = torch.utils.data.DataLoader(rows, batch_size=7, shuffle=True)
    return results(model, model.fit(loader, epochs=2, verbose=0).history["loss"])


def a_generator():
    model = dense()

    def batches():
        x, y = data()
        for start in range(0, 23, 6):
            yield x[start : start + 6], y[start : start + 6]

    return results(model, model.fit(batches(), verbose=0).history["loss"])


def a_state_from_batch_to_batch():
    model = made(keras.Input((3, 2), batch_size=4), layers.GRU(3, stateful=True), layers.Dense(2))
    x = np.random.default_rng(1).normal(size=(12, 3, 2))
    if SIZE == 1:
        lockstep.distribute(model, 1)  # stock Keras on PyTorch raises an error
    history = model.fit(x, data(12)[1], batch_size=4, epochs=2, **QUIET).history["loss"]
    return results(model, history, model.predict(x, batch_size=4, verbose=0))


CASES = [
    a_model_that_predict_builds,
    a_model_that_predict_on_batch_builds,
    a_buffer_and_a_quantized_layer,
    a_fit_of_its_own,
    a_step_of_its_own,
    one_row_and_fewer_rows_than_processes,
    weights_masks_and_metrics,
    accumulation_clipping_and_averages,
    callbacks_that_decide,
    a_loader_that_shuffles,
    a_generator,
    a_state_from_batch_to_batch,
]


def main(path):
    warnings.simplefilter("ignore")
    found = {}
    for case in CASES:
        keras.utils.set_random_seed(1 + RANK)  # the same in no two processes
        for number, value in enumerate(case()):
            value = keras.ops.convert_to_numpy(value) if torch.is_tensor(value) else value
            found[f"{case.__name__} {number}"] = np.asarray(value)
    np.savez(f"{path}-{RANK}.npz", **found)
    print("the end")


if __name__ == "__main__":
    main(sys.argv[1])
