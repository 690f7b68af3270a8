"""`python benchmarks/input_ahead.py`: is data that take time made while the device computes?

A generator sleeps for as long as a step of the CNN takes, then yields a batch. If it is
asked while the device computes, a step takes as long as one of the two; if not, as long as
both. Wall time over that of the same steps with batches that are ready, because overlap is
what is measured; a callback that looks at every step's loss has to wait for each step, unless
a thread makes the next batches meanwhile. The sides take turns on one core, every other round
backwards.
"""

import argparse
import os
import time

os.environ["KERAS_BACKEND"] = "jax"

import keras
from peers import spread, versions
from two_processes import ROWS, data, keras_model
from workers import pin

import lockstep


class Looks(keras.callbacks.Callback):
    """Wants the loss of every step."""

    def on_train_batch_end(self, batch, logs=None):
        assert logs["loss"] > 0


def seconds(model, steps, pause, callbacks):
    """Of so many steps over batches that take `pause` seconds each to make."""
    x, y = data(1, ROWS)

    def batches():
        while True:
            time.sleep(pause)
            yield x, y

    start = time.perf_counter()
    model.fit(batches(), steps_per_epoch=steps, verbose=0, callbacks=callbacks)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    pin(0)  # before JAX starts its threads
    load = os.getloadavg()[0]
    models = {
        "lockstep": lockstep.distribute(keras_model(), 1),
        "lockstep, prefetch=2": lockstep.distribute(keras_model(), 1, prefetch=2),
        "Keras": keras_model(),
    }
    sides = [(name, callback) for name in models for callback in (None, Looks)]
    for name, callback in sides:
        seconds(models[name], 3, 0, [callback()] if callback else [])
    ratios = {side: [] for side in sides}
    for number in range(options.rounds):
        for name, callback in sides if number % 2 else reversed(sides):
            callbacks = [callback()] if callback else []
            ready = seconds(models[name], options.steps, 0, callbacks)
            made = seconds(models[name], options.steps, ready / options.steps, callbacks)
            ratios[name, callback].append(made / ready)
    print(f"load: {load:.2f} to {os.getloadavg()[0]:.2f}; {versions()}")
    for (name, callback), values in ratios.items():
        looks = "looks at every loss" if callback else "no callback"
        middle, low, high = spread(values)
        print(f"{name}, {looks}: {middle:.2f} [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
