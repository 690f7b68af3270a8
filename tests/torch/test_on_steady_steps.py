"""What a steady training step touches and exchanges: these numbers may only fall."""

import collections
import gc
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.engines.torch.exchange import group
from lockstep.engines.torch.ranks import pool
from lockstep.engines.torch.same_model import code_state

SOURCE = str(Path(lockstep.__file__).parent)


def cnn():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def cnn_with_norm():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def transformer():
    tokens = keras.Input((8,), dtype="int32")
    x = layers.Embedding(20, 8)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    x = x + layers.Dense(8)(layers.Dense(16, activation="gelu")(x))
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


CASES = {
    "cnn": (cnn, ()),
    "norm and metric": (cnn_with_norm, ("accuracy",)),
    "transformer": (transformer, ()),
}

MOST = {
    "cnn": {"files": 27, "messages": 1, "exchanges": 1, "scans": 0},
    "norm and metric": {"files": 28, "messages": 1, "exchanges": 4, "scans": 0},
    "transformer": {"files": 27, "messages": 1, "exchanges": 1, "scans": 0},
}


@pytest.fixture
def counted(monkeypatch):
    """Counts the messages to workers, the exchanges of tensors and the scans of attributes."""
    found = collections.Counter()

    def counts(owner, name, what):
        plain = getattr(owner, name)

        def method(*args, **kwargs):
            found[what] += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, method)

    counts(pool.Pool, "send", "messages")
    for name in ("_send_sums", "gather", "broadcast_in_place"):
        counts(group.RankGroup, name, "exchanges")
    for name in ("_code_changed", "objects_changed"):
        counts(code_state.CodeReads, name, "scans")
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_steady_step_touches_and_exchanges_no_more_than_before(name, counted):
    build, metrics = CASES[name]
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=list(metrics))
    lockstep.distribute(model, 3)
    rng = np.random.default_rng(0)
    shape = model.inputs[0].shape[1:]
    x, y = rng.integers(0, 2, (48, *shape)), rng.integers(0, 10, 48)
    model.fit(x, y, batch_size=6, verbose=0)  # workers have everything
    counts = []
    files = set()

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            name = frame.f_code.co_filename.removeprefix(SOURCE)
            # What is private in Keras counts once, in whatever file it is.
            files.add("/keras_compat" if name.startswith("/keras_compat/") else name)

    function = model.train_function
    batches = []

    def steady(iterator):
        batches.append(0)
        if len(batches) != 6:
            return function(iterator)
        counted.clear()
        sys.setprofile(profile)
        try:
            return function(iterator)
        finally:
            sys.setprofile(None)
            counts.append(dict(counted))

    model.train_function = steady
    gc.collect()  # the end of a model of another test is a message to the workers
    gc.disable()
    try:
        model.fit(x, y, batch_size=6, verbose=0)
    finally:
        gc.enable()
    (count,) = counts
    found = {"files": len(files), **{what: count.get(what, 0) for what in list(MOST[name])[1:]}}
    assert all(found[what] <= most for what, most in MOST[name].items()), found
