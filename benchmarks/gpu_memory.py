"""The most bytes of a GPU that a training step takes, and its time, with the batch in parts.

    KERAS_BACKEND=jax python benchmarks/gpu_memory.py 4

A transformer of six layers trains on 64 texts of 512 words, in as many parts as the argument says.
What `lockstep plan` estimates for it before is printed too. `gpu_check.py` runs this.
"""

import argparse
import json
import time

from one_accelerator import first_device

ROWS, WORDS = 64, 512


def transformer(layers=6, width=512, words=WORDS, rows=ROWS):
    """Return a compiled model and its data, as `lockstep bench` and `plan` want them."""
    import keras
    import numpy as np
    from keras import layers as made

    keras.utils.set_random_seed(0)
    inputs = keras.Input((words,), dtype="int32")
    hidden = made.Embedding(8000, width)(inputs)
    for _ in range(layers):
        attended = made.MultiHeadAttention(8, width // 8)(hidden, hidden, use_causal_mask=True)
        hidden = made.LayerNormalization()(hidden + attended)
        wide = made.Dense(4 * width, "gelu")(hidden)
        hidden = made.LayerNormalization()(hidden + made.Dense(width)(wide))
    model = keras.Model(inputs, made.Dense(8000)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss)
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 8000, (rows, words)).astype("int32") for _ in range(2))
    return model, (x, y)


def main():
    """Measure in this process, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", type=int)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    import keras

    import lockstep

    size = {"layers": 1, "width": 32, "words": 16, "rows": 16} if arguments.small else {}
    model, (x, y) = transformer(**size)
    rows = len(x)
    each = {"micro_batch_size": rows // arguments.parts} if arguments.parts > 1 else {}
    planned = lockstep.plan(
        model, (x, y), devices=1, batch_size=rows, memory="80GB", **each
    ).layouts[0]
    lockstep.distribute(model, devices=1, **each)
    begun = time.perf_counter()
    model.fit(x, y, batch_size=rows, verbose=0)
    first = time.perf_counter() - begun
    begun = time.perf_counter()
    loss = model.fit(x, y, batch_size=rows, epochs=5, verbose=0).history["loss"][-1]
    device, peak = first_device()
    found = {
        "backend": keras.backend.backend(),
        "device": device,
        "parts": arguments.parts,
        "first step, s": round(first, 2),
        "step, ms": round((time.perf_counter() - begun) / 5 * 1e3, 1),
        "peak, GB": None if peak is None else round(peak / 1e9, 2),
        "planned peak, GB": None if planned.peak is None else round(planned.peak / 1e9, 3),
        "loss": loss,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
