"""Calls in which two processes on PyTorch differ, one after the other; each prints what it met."""

import keras
import numpy as np
from keras import layers

import lockstep
from lockstep.errors import ProcessesDisagree
from tests.launch.torch_train import build, data

RANK, _ = lockstep.initialize()
QUIET = {"batch_size": 10, "verbose": 0, "shuffle": False}


def other_rows(model, x, y):
    model.fit(x + RANK, y, **QUIET)


def other_last_rows(model, x, y):
    x[-1] += RANK
    model.fit(x, y, **QUIET)


def other_number_of_rows(model, x, y):
    rows = len(x) - 10 * RANK
    model.fit(x[:rows], y[:rows], **QUIET)


def fewer_batches(model, x, y):
    def batches():
        for start in range(0, 40 - 10 * RANK, 10):
            yield x[start : start + 10], y[start : start + 10]

    model.fit(batches(), verbose=0)


def assigned_by_one(model, x, y):
    def assign(batch, logs):
        if RANK:
            model.layers[0].kernel.assign(model.layers[0].kernel + 1.0)

    model.fit(x, y, **QUIET, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=assign)])


def an_error_in_a_step(model, x, y):
    def fails(y_true, y_pred):
        """Fail in process 1, in the second step."""
        if RANK == 1 and int(failing.optimizer.iterations.value) == 1:
            raise KeyError("no such thing")
        return keras.losses.mean_squared_error(y_true, y_pred)

    failing = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    failing.compile("sgd", fails)
    try:
        lockstep.distribute(failing).fit(x, y, **QUIET)
    finally:
        assert int(failing.optimizer.iterations.value) == 1, "the weights are those of all"


class Depends(layers.Layer):
    """Looks across the batch in one process."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0) if RANK else x * 1.0


def another_plan(model, x, y):
    other = keras.Sequential([keras.Input((6,)), Depends(), layers.Dense(3)])
    other.compile("sgd", "mse")
    lockstep.distribute(other).fit(x, y, **QUIET)


def another_batch_by_hand(model, x, y):
    model.train_on_batch(x[: 9 + RANK], y[: 9 + RANK])


def another_late_row_by_hand(model, x, y):
    many = np.tile(x, (20_000 // len(x), 1))
    many[-5, 1] += RANK  # not among the numbers of a sample
    model.predict_on_batch(many)


def another_model(model, x, y):
    units = 3 + RANK
    other = keras.Sequential([keras.Input((6,)), layers.Dense(units)])
    lockstep.distribute(other)


def another_call(model, x, y):
    if RANK:
        model.predict(x, verbose=0)
    else:
        model.fit(x, y, **QUIET)


def main():
    model = lockstep.distribute(build())
    cases = [
        other_rows,
        other_last_rows,
        other_number_of_rows,
        fewer_batches,
        assigned_by_one,
        an_error_in_a_step,
        another_plan,
        another_batch_by_hand,
        another_late_row_by_hand,
        another_model,
        another_call,
    ]
    for case in cases:
        try:
            case(model, *data())
        except (ProcessesDisagree, KeyError) as error:
            print(f"{case.__name__}: {type(error).__name__}: {error}".replace("\n", " "))
        else:
            print(f"{case.__name__}: nothing")
    x, _ = data()
    model.set_weights(build().get_weights())
    predicted = model.predict(x, verbose=0)
    np.testing.assert_allclose(predicted, build().predict(x, verbose=0), rtol=0, atol=1e-10)
    print("the end")


if __name__ == "__main__":
    main()
