"""Averaged weights (`use_ema`): the truth is written out by hand.

Keras alone cannot be asked on JAX: the average and the variable share a buffer there,
which the next step gives away.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lockstep

ROWS, BATCH, RATE, MOMENTUM = 62, 11, 0.1, 0.7  # six steps an epoch, the last of 7 rows
EPOCHS = 2


def data():
    rng = np.random.default_rng(4)
    return (
        rng.normal(size=(ROWS, 4)).astype("float32"),
        rng.normal(size=(ROWS, 2)).astype("float32"),
    )


def model(keras, every=None):
    keras.utils.set_random_seed(3)
    made = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )
    optimizer = keras.optimizers.SGD(
        RATE, use_ema=True, ema_momentum=MOMENTUM, ema_overwrite_frequency=every
    )
    made.compile(optimizer, "mse")
    return made


def by_hand(weights, every=None, averages=None):
    """Plain descent, the average beside it: weights and averages after all epochs.

    The first average is the first weight; `averages` are those of a fit before.
    """
    x, y = data()

    @jax.jit
    def gradients(weights, x, y):
        def loss(weights):
            kernel, bias, kernel2, bias2 = weights
            return jnp.mean((jnp.tanh(x @ kernel + bias) @ kernel2 + bias2 - y) ** 2)

        return jax.grad(loss)(weights)

    step = 0
    for _ in range(EPOCHS):
        for start in range(0, ROWS, BATCH):
            rows = slice(start, start + BATCH)
            changes = gradients(weights, x[rows], y[rows])
            weights = [w - RATE * np.asarray(g) for w, g in zip(weights, changes, strict=True)]
            averages = averages or weights
            pairs = zip(averages, weights, strict=True)
            averages = [MOMENTUM * a + (1 - MOMENTUM) * w for a, w in pairs]
            step += 1
            if every and step % every == 0:
                weights = averages
    return weights, averages


def assert_near(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=1e-5)


def fit(made, **kwargs):
    return made.fit(*data(), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, **kwargs)


def averages_of(made):
    return [v.value for v in made.optimizer.variables if "average" in v.path]


@pytest.mark.parametrize("devices", [1, 3, 4])
def test_the_weights_are_the_averages_after_fit(keras, devices):
    made = lockstep.distribute(model(keras), devices)
    _, averages = by_hand(made.get_weights())
    fit(made)
    assert_near(made.get_weights(), averages)
    assert_near(averages_of(made), averages)


@pytest.mark.parametrize("devices", [1, 4])
def test_weights_overwritten_every_few_steps(keras, devices):
    made = lockstep.distribute(model(keras, every=5), devices)
    # Twelve steps: overwritten after the fifth and tenth, and when fit ends.
    _, averages = by_hand(made.get_weights(), every=5)
    fit(made)
    assert_near(made.get_weights(), averages)


def test_the_weights_between_steps_are_not_averaged(keras):
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.model.get_weights())

    made = lockstep.distribute(model(keras), 3)
    weights, _ = by_hand(made.get_weights())
    fit(made, callbacks=[Look()])
    assert_near(seen[-1], weights)


def test_fit_goes_on_from_the_averages(keras):
    made = lockstep.distribute(model(keras), 3)
    _, averages = by_hand(made.get_weights())
    _, averages = by_hand(averages, averages=averages)
    fit(made)
    fit(made)
    assert_near(made.get_weights(), averages)
    made.evaluate(*data(), verbose=0)


def test_swapped_for_evaluation_by_the_callback(keras):
    made = lockstep.distribute(model(keras), 4)
    _, averages = by_hand(made.get_weights())
    seen = []

    class Look(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            seen.append(self.model.get_weights())

    swap = keras.callbacks.SwapEMAWeights()
    fit(made, callbacks=[swap, Look()], validation_data=data())
    assert_near(seen[-1], averages)
