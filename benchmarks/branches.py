"""`python benchmarks/branches.py`: two LSTM branches on two devices.

Rehearsed devices, one core each. Small sequential operations, as those of an LSTM, keep one core
busy for each device, so that branches can overlap here.

Branches: the same model by Keras on one device, by lockstep on two devices, and as a loop written
by hand in JAX that starts a program for each stage. All take turns in one process. A ratio is the
wall time of one device over that of two in the same round: median [least, most].
"""

import argparse
import os
import statistics
import time

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("LOCKSTEP_REHEARSE", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import lockstep  # noqa: I001  (follows LOCKSTEP_REHEARSE before JAX starts)

import jax
import jax.numpy as jnp
import keras
import numpy as np

WIDTH = 32
OUTPUTS = 4
RATE = 0.1


def branches(units, length, placed):
    """The model: two LSTMs of equal cost and a head."""
    keras.utils.set_random_seed(3)
    a, b = keras.Input((length, WIDTH)), keras.Input((length, WIDTH))
    left = keras.layers.LSTM(units, name="left")(a)
    right = keras.layers.LSTM(units, name="right")(b)
    outputs = keras.layers.Dense(OUTPUTS, name="head")(keras.layers.concatenate([left, right]))
    model = keras.Model([a, b], outputs)
    model.compile(keras.optimizers.SGD(RATE), "mse")
    if placed:
        lockstep.place(model, {"left": 0, "right": 1, "concatenate*": 2, "head": 2})
    return model


# ------------------------------------------------------------------------- loops by hand


def layer_function(layer, training=True):
    """A Keras layer as a function of its weights and inputs, without its variables."""

    def call(weights, x):
        others = [variable.value for variable in layer.non_trainable_variables]
        return layer.stateless_call(weights, others, x, training=training)[0]

    return call


def updated(weights, gradients):
    return [w - RATE * g for w, g in zip(weights, gradients, strict=True)]


def weights_of(layers, device):
    found = [[v.value for v in layer.trainable_variables] for layer in layers]
    return jax.device_put(found, device)


def branches_by_hand(units, length):
    """Rounds of training: a stage for each branch, one for the head, and their backward stages."""
    model = branches(units, length, placed=False)
    devices = jax.devices()
    left, right, head = (model.get_layer(name) for name in ("left", "right", "head"))
    homes = zip((left, right, head), devices[:3], strict=True)
    weights = [weights_of([layer], device)[0] for layer, device in homes]
    run = layer_function(left), layer_function(right), layer_function(head)

    def loss(weights, a, b, y):
        return jnp.mean((run[2](weights, jnp.concatenate([a, b], -1)) - y) ** 2)

    forward = [jax.jit(lambda w, x, f=f: jax.vjp(f, w, x)) for f in run[:2]]
    backward = jax.jit(lambda vjp, gradient, w: updated(w, vjp(gradient)[0]), donate_argnums=2)

    @jax.jit
    def top(weights, a, b, y):
        value, (g, ga, gb) = jax.value_and_grad(loss, (0, 1, 2))(weights, a, b, y)
        return value, updated(weights, g), ga, gb

    def fit(x, y, batch):
        nonlocal weights
        value = None
        for first in range(0, len(y), batch):
            rows = slice(first, first + batch)
            one, vjp_a = forward[0](weights[0], jax.device_put(x[0][rows], devices[0]))
            two, vjp_b = forward[1](weights[1], jax.device_put(x[1][rows], devices[1]))
            one, two, here = jax.device_put([one, two, y[rows]], devices[2])
            value, weights[2], ga, gb = top(weights[2], one, two, here)
            weights[0] = backward(vjp_a, jax.device_put(ga, devices[0]), weights[0])
            weights[1] = backward(vjp_b, jax.device_put(gb, devices[1]), weights[1])
        return jax.block_until_ready((value, weights))[0]

    return fit


# ------------------------------------------------------------------------------ measuring


def fit_of(model):
    return lambda x, y, batch: model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)


def measure(runs, x, y, batch, rounds):
    """Wall seconds of each run, by round; the runs take turns, every other round backwards."""
    for run in runs.values():
        run(x, y, batch)  # compiles
    seconds = {name: [] for name in runs}
    for number in range(rounds):
        order = list(runs) if number % 2 == 0 else list(reversed(runs))
        for name in order:
            start = time.perf_counter()
            runs[name](x, y, batch)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(over, under):
    found = [a / b for a, b in zip(over, under, strict=True)]
    return f"{statistics.median(found):.2f} [{min(found):.2f}, {max(found):.2f}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--length", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("| model | lockstep over one device | by hand over one device | lockstep over by hand |")
    print("|---|---|---|---|")
    rng = np.random.default_rng(0)

    def row(name, runs, x, batch):
        y = rng.normal(size=(len(x[0] if isinstance(x, list) else x), OUTPUTS)).astype("float32")
        s = measure(runs, x, y, batch, options.rounds)
        cells = ratio(s["one"], s["lockstep"]), ratio(s["one"], s["hand"])
        print(f"| {name} | {' | '.join(cells)} | {ratio(s['hand'], s['lockstep'])} |", flush=True)

    def draw(count):
        return rng.normal(size=(count, options.length, WIDTH)).astype("float32")

    for units in options.units:
        runs = {
            "one": fit_of(lockstep.distribute(branches(units, options.length, False), 1)),
            "lockstep": fit_of(branches(units, options.length, True)),
            "hand": branches_by_hand(units, options.length),
        }
        count = options.steps * options.batch
        row(f"two branches, {units} units", runs, [draw(count), draw(count)], options.batch)


if __name__ == "__main__":
    main()
