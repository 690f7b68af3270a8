"""CPU time per training step: a hand-written JAX loop, stock Keras, lockstep on one device.

    KERAS_BACKEND=jax OMP_NUM_THREADS=1 python benchmarks/trainer_tax.py

All sides run the same model on the same shuffled rows with the same loss and metrics,
in turn in one process, round after round; the progress bar is on for the fits, with
stock callbacks attached, and each runs once more with `steps_per_execution=20`. What is
compared is `time.process_time`, which a busy machine disturbs less than the clock on the
wall, and the ratio within each round. `--json` prints everything as one object.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import io
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from keras import layers

import lockstep

BATCH = 32
Run = Callable[[], None]


# ------------------------------------------------------------------------ the models


def mlp() -> keras.Model:
    """Three small dense layers."""
    return keras.Sequential(
        [keras.Input((64,))]
        + [layers.Dense(64, activation="relu") for _ in range(2)]
        + [layers.Dense(10)]
    )


def many() -> keras.Model:
    """Many small variables: a hundred dense layers."""
    return keras.Sequential(
        [keras.Input((64,))]
        + [layers.Dense(16, activation="tanh") for _ in range(100)]
        + [layers.Dense(10)]
    )


def cnn() -> keras.Model:
    """A small convolutional network on 16 by 16 images."""
    return keras.Sequential(
        [keras.Input((256,)), layers.Reshape((16, 16, 1))]
        + [layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(2)]
        + [layers.GlobalAveragePooling2D(), layers.Dense(10)]
    )


def transformer() -> keras.Model:
    """Two small transformer blocks on 16 tokens."""
    inputs = keras.Input((256,))
    x = layers.Reshape((16, 16))(inputs)
    x = layers.Dense(32)(x)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 16)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, "gelu")(x)))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


MODELS = {"mlp": mlp, "many": many, "cnn": cnn, "transformer": transformer}
STEPS = {"mlp": 1000, "many": 200, "cnn": 200, "transformer": 200}


# -------------------------------------------------------------------------- the loops


def compiled(build: Callable[[], keras.Model], times: int = 1) -> keras.Model:
    """The model, from the same start each time, with loss, optimizer and a metric."""
    keras.utils.set_random_seed(0)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.Adam(1e-3),
        loss,
        metrics=["sparse_categorical_accuracy"],
        steps_per_execution=times,
    )
    return model


def data(model: keras.Model, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """As many rows as `steps` batches have."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps * BATCH, *model.input_shape[1:])).astype("float32")
    return x, rng.integers(0, 10, size=len(x)).astype("int32")


def by_hand(model: keras.Model, x: np.ndarray, y: np.ndarray) -> Run:
    """One epoch of a loop as Keras's guide to JAX writes it, with the same metrics."""
    optimizer, loss_function = model.optimizer, model.loss
    optimizer.build(model.trainable_variables)
    mean = keras.metrics.Mean()
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    def loss_of(trainable: Any, non_trainable: Any, x: Any, y: Any) -> Any:
        y_pred, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        return loss_function(y, y_pred), (y_pred, non_trainable)

    def step(state: Any, x: Any, y: Any) -> Any:
        trainable, non_trainable, slots, means, hits = state
        gradient = jax.value_and_grad(loss_of, has_aux=True)
        (loss, (y_pred, non_trainable)), gradients = gradient(trainable, non_trainable, x, y)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        means = mean.stateless_update_state(means, loss, sample_weight=x.shape[0])
        hits = accuracy.stateless_update_state(hits, y, y_pred)
        logs = {"loss": mean.stateless_result(means), "acc": accuracy.stateless_result(hits)}
        return logs, (trainable, non_trainable, slots, means, hits)

    run = jax.jit(step, donate_argnums=0)
    variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    kept = [tuple([jax.numpy.copy(v.value) for v in group] for group in variables)]

    def epoch() -> None:
        state = (*kept[0], *([v.value + 0 for v in m.variables] for m in (mean, accuracy)))
        order = np.random.permutation(len(x))
        for start in range(0, len(x), BATCH):
            rows = order[start : start + BATCH]
            logs, state = run(state, x[rows], y[rows])
        {name: float(value) for name, value in logs.items()}
        kept[0] = state[:3]

    return epoch


def by_fit(model: keras.Model, x: np.ndarray, y: np.ndarray, **kwargs: Any) -> Run:
    """One epoch of `fit`, with progress bar and stock callbacks."""

    def epoch() -> None:
        callbacks = [
            keras.callbacks.EarlyStopping("loss", patience=1000),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1000),
        ]
        with contextlib.redirect_stdout(io.StringIO()):
            model.fit(x, y, batch_size=BATCH, callbacks=callbacks, **kwargs)

    return epoch


# ------------------------------------------------------------------------ the numbers


def measure(name: str, rounds: int, steps: int) -> dict[str, Any]:
    """CPU milliseconds per step of each side, and the ratios within each round."""
    x, y = data(compiled(MODELS[name]), steps)
    one_step = {"keras": by_fit(compiled(MODELS[name]), x[:BATCH], y[:BATCH])}
    one_step["lockstep"] = by_fit(
        lockstep.distribute(compiled(MODELS[name]), devices=1), x[:BATCH], y[:BATCH]
    )
    calls = {side: _milliseconds(run) for side, run in one_step.items()}
    sides = {
        "by hand": by_hand(compiled(MODELS[name]), x, y),
        "keras": by_fit(compiled(MODELS[name]), x, y),
        "lockstep": by_fit(lockstep.distribute(compiled(MODELS[name]), devices=1), x, y),
        "keras, 20 at once": by_fit(compiled(MODELS[name], 20), x, y),
        "lockstep, 20 at once": by_fit(
            lockstep.distribute(compiled(MODELS[name], 20), devices=1), x, y
        ),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 2):
        order = list(sides) if number % 2 else list(reversed(sides))
        for side in order:
            start = time.process_time()
            sides[side]()
            if number >= 2:  # the first two compile and warm up
                times[side].append((time.process_time() - start) * 1e3 / steps)
    ratios = {
        side: sorted(mine / hand for mine, hand in zip(times[side], times["by hand"], strict=True))
        for side in sides
    }
    return {
        "model": name,
        "steps per round": steps,
        "rounds": rounds,
        "milliseconds of a fit of one step": calls,
        "milliseconds": {side: statistics.median(values) for side, values in times.items()},
        "ratio": {side: statistics.median(values) for side, values in ratios.items()},
        "quartiles": {
            side: [values[len(values) // 4], values[-1 - len(values) // 4]]
            for side, values in ratios.items()
        },
    }


def _milliseconds(run: Run) -> float:
    times = []
    for _ in range(7):
        start = time.process_time()
        run()
        times.append((time.process_time() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, help="steps per round; the model's own by default")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    before = os.getloadavg()[0]
    results = [
        measure(name, arguments.rounds, arguments.steps or STEPS[name]) for name in arguments.models
    ]
    around = {
        "load average": [before, os.getloadavg()[0]],
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            "keras": keras.__version__,
            "jax": jax.__version__,
        },
    }
    if arguments.json:
        print(json.dumps({"results": results, **around}, indent=1))
        return
    print("CPU time per step; ratio to the loop by hand, median [quartiles] of the rounds")
    for result in results:
        print(f"{result['model']}:")
        for side, milliseconds in result["milliseconds"].items():
            low, high = result["quartiles"][side]
            ratio = result["ratio"][side]
            print(f"  {side:20} {milliseconds:8.3f} ms   {ratio:5.2f} [{low:.2f}, {high:.2f}]")
        calls = result["milliseconds of a fit of one step"].items()
        print("  a fit of one step:", ", ".join(f"{side} {call:.1f} ms" for side, call in calls))
    print(around)


if __name__ == "__main__":
    main()
