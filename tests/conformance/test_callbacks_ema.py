"""Averaged weights over several fits, which Keras alone cannot do on JAX."""

import keras
import numpy as np

import lockstep
from tests.conformance.common import assert_same
from tests.conformance.side_by_side import BATCH, ROWS, data


def test_swap_ema_weights_in_two_fits_is_the_hand_written_loop():
    """Keras alone fails in the second fit (3.15.1): an average and its weight share a buffer."""
    x, y = data()
    rate, momentum, keep = 0.02, 0.9, 0.8

    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, use_bias=False)])
    made.compile(
        keras.optimizers.SGD(rate, momentum=momentum, use_ema=True, ema_momentum=keep), "mse"
    )
    kernel = np.asarray(made.get_weights()[0], "float64")
    lockstep.distribute(made, 4)

    velocity, average = np.zeros_like(kernel), None
    for _ in range(2):
        validated = made.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=2,
            shuffle=False,
            verbose=0,
            validation_data=(x, y),
            callbacks=[keras.callbacks.SwapEMAWeights()],
        ).history["val_loss"]
        losses = []
        for _ in range(2):
            for start in range(0, ROWS, BATCH):
                rows, targets = x[start : start + BATCH], y[start : start + BATCH]
                gradient = rows.T @ (rows @ kernel - targets) * 2 / targets.size
                velocity = momentum * velocity - rate * gradient
                kernel = kernel + velocity
                average = kernel if average is None else keep * average + (1 - keep) * kernel
            losses.append(np.mean((x @ average - y) ** 2))
        kernel = average  # at its end fit leaves the averages in the model
        assert_same(validated, losses)
        assert_same(made.get_weights(), [kernel])
        assert_same(made.evaluate(x, y, verbose=0), np.mean((x @ kernel - y) ** 2))
