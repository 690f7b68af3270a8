"""What a micro-batch saves and costs, and how far Keras's gradient accumulation is from the batch.

OMP_NUM_THREADS=1 python benchmarks/micro_batches.py                 # one device
LOCKSTEP_REHEARSE=2 python benchmarks/micro_batches.py --devices 2
OMP_NUM_THREADS=1 python benchmarks/micro_batches.py --differences   # in float64
KERAS_BACKEND=torch OMP_NUM_THREADS=1 python benchmarks/micro_batches.py

The first table has the temporary memory of the compiled training step on a device, on PyTorch the
largest sum of the bytes that the tensors of a step have at a time, and the time of
a step of `fit`: the least of some rounds, as other work on the machine only adds to it. Without
`--devices`, the batch of 256 rows is that of one device.

The second table compares trainings in float64 with the plain training of the same batch, after two
epochs of 250 rows in batches of 64: the last batch has 58 rows. The first column is micro-batches
of 16 rows. The second one is `gradient_accumulation_steps=4` with batches of 16 rows, which many
scripts use for the same end.
"""

import argparse
import time

import keras
import numpy as np
from keras import layers

import lockstep
from lockstep.attach.attachment import session_of
from lockstep.core.engine import TRAIN
from lockstep.keras_compat import compute_in_float64

ROWS, CLASSES = 256, 4


def blocks(x, count, dropout=0.0):
    for _ in range(count):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 16, dropout=dropout)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(128, "gelu")(x)))
    return x


def transformer():
    inputs = keras.Input((64,), dtype="int32")
    x = blocks(layers.Embedding(500, 32)(inputs), 3)
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


def language():
    """Logits of 500 words for each token: larger than all activations."""
    inputs = keras.Input((64,), dtype="int32")
    return keras.Model(inputs, layers.Dense(500)(blocks(layers.Embedding(500, 32)(inputs), 1)))


def lstm():
    made = [keras.Input((64, 16)), layers.LSTM(32, return_sequences=True), layers.LSTM(32)]
    return keras.Sequential([*made, layers.Dense(CLASSES)])


def cnn():
    inputs = x = keras.Input((24, 24, 3))
    for filters, strides in ((16, 1), (16, 1), (32, 2), (32, 1), (64, 2), (64, 1)):
        x = layers.Conv2D(filters, 3, strides=strides, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def masked():
    """Sentences of other lengths: the loss is a mean over the words that are there."""
    inputs = keras.Input((12,), dtype="int32")
    x = layers.LSTM(16, return_sequences=True)(layers.Embedding(50, 8, mask_zero=True)(inputs))
    return keras.Model(inputs, layers.Dense(50)(x))


def noisy():
    made = [keras.Input((16,)), layers.Dense(32, "relu"), layers.Dropout(0.5)]
    return keras.Sequential([*made, layers.Dense(CLASSES)])


MODELS = {"transformer": transformer, "language model": language, "LSTM": lstm, "CNN": cnn}
COMPARED = {"dense, dropout": noisy, "masked LSTM": masked, "transformer": transformer, "CNN": cnn}


def made(build, **optimizer):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, **optimizer), loss, metrics=["accuracy"])
    return model


def data(model, rows=ROWS):
    rng = np.random.default_rng(0)
    shape, classes = model.input_shape[1:], model.output_shape[-1]
    if "int" not in model.inputs[0].dtype:
        x = rng.normal(size=(rows, *shape)).astype("float32")
    else:
        x = rng.integers(1, 50, (rows, *shape))
        x[np.arange(shape[0]) >= rng.integers(1, shape[0] + 1, rows)[:, None]] = 0
    return x, rng.integers(0, classes, (rows, *model.output_shape[1:-1]))


def temporaries(model, x, y):
    """The MB that a training step needs on a device besides its arguments."""
    model.train_on_batch(x, y)  # builds all
    if keras.backend.backend() == "torch":
        return live_bytes(lambda: model.train_on_batch(x, y)) / 1e6
    step = session_of(model).step_function(TRAIN, force=True)
    groups = ("trainable", "non_trainable", "optimizer", "metrics")
    state = [[each.value for each in getattr(model, f"{name}_variables", [])] for name in groups]
    state[2] = [each.value for each in model.optimizer.variables]
    program = step.run.lower(step.settle(tuple(state)), step.place((x, y))).compile()
    return program.memory_analysis().temp_size_in_bytes / 1e6


def live_bytes(run):
    """Return the largest sum of bytes that PyTorch has allocated at a time while `run` runs."""
    import torch

    with torch.profiler.profile(profile_memory=True) as seen:
        run()
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def seconds(model, x, y, rounds, steps=4):
    times = []
    many = [np.concatenate([each] * steps) for each in (x, y)]
    for _ in range(rounds + 1):
        start = time.perf_counter()
        model.fit(*many, batch_size=len(x), verbose=0, shuffle=False)
        times.append((time.perf_counter() - start) / steps)
    return min(times[1:])


def sizes_and_times(devices, rounds):
    print("| model | rows of a device at once | temporaries (MB) | of all | step (ms) | of all |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, build in MODELS.items():
        first = None
        for parts in (1, 2, 4, 8):
            size = -(-ROWS // devices // parts)
            model = made(build)
            options = {} if parts == 1 else {"micro_batch_size": size}
            lockstep.distribute(model, devices, **options)
            x, y = data(model)
            found = temporaries(model, x, y), 1e3 * seconds(model, x, y, rounds)
            first = first or found
            of_all = [one / other for one, other in zip(found, first, strict=True)]
            print(
                f"| {name} | {size} | {found[0]:.1f} | {of_all[0]:.2f} | {found[1]:.0f} | "
                f"{of_all[1]:.2f} |",
                flush=True,
            )


def weights(build, batch, micro_batch_size=None, **optimizer):
    model = made(build, **optimizer)
    if micro_batch_size is not None:
        lockstep.distribute(model, 1, micro_batch_size=micro_batch_size)
    x, y = data(model, 250)
    model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return [np.asarray(each) for each in model.get_weights()]


def differences():
    compute_in_float64()
    print("| model | micro_batch_size=16 | gradient_accumulation_steps=4 |")
    print("|---|---:|---:|")
    for name, build in COMPARED.items():
        plain = weights(build, 64)
        rows = [
            weights(build, 64, micro_batch_size=16),
            weights(build, 16, gradient_accumulation_steps=4),
        ]
        apart = [
            max(float(np.max(np.abs(a - b))) for a, b in zip(plain, row, strict=True))
            for row in rows
        ]
        print(f"| {name} | {apart[0]:.1e} | {apart[1]:.1e} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--differences", action="store_true")
    asked = parser.parse_args()
    if asked.differences:
        differences()
    else:
        sizes_and_times(asked.devices, asked.rounds)
