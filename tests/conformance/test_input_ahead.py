"""Batches are drawn while the devices still run a step before."""

import jax
import keras
import numpy as np

import lockstep

ROWS, STEPS = 512, 6


class Slow(keras.layers.Layer):
    """Keeps a device busy for a hundred times what a batch of this test takes to draw."""

    def call(self, inputs):
        square = inputs @ inputs.T
        for _ in range(40):
            square = jax.numpy.tanh(square @ square)
        return inputs + jax.lax.stop_gradient(square.mean())


class Begun(keras.callbacks.Callback):
    """Knows whether a step was begun."""

    begun = False

    def on_train_batch_begin(self, batch, logs=None):
        self.begun = True


def test_two_batches_are_drawn_while_the_step_before_them_runs():
    notes, drawn, step_before, running = Begun(), [], [], []

    def batch(index):
        if notes.begun:  # before that, Keras looks at some
            drawn.append(index)
            if len(drawn) == 2:
                step_before.extend(jax.tree.leaves(vars(model)["_jax_state"]._kept[-1][0]))
            if len(drawn) == 3:
                running.append(not any(value.is_ready() for value in step_before))
        return np.full((ROWS, 3), index, "float32"), np.zeros((ROWS, 1), "float32")

    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(Slow()(inputs)))
    lockstep.distribute(model, 2)
    model.compile("sgd", "mse")
    data = (batch(index) for index in range(2 * STEPS))
    model.fit(data, shuffle=False, steps_per_epoch=STEPS, verbose=0, callbacks=[notes])
    assert step_before
    assert running == [True]
