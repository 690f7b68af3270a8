"""What a steady training step on JAX touches, from one batch to the next: these may only fall."""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.training.callbacks import Callbacks

SOURCE = str(Path(lockstep.__file__).parent)


def perceptron():
    return [keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(16, "relu"), layers.Dense(10)]


def cnn_with_norm():
    norm = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()]
    return [keras.Input((8, 8, 1)), *norm, layers.Flatten(), layers.Dense(10)]


@pytest.mark.parametrize(
    ("build", "devices", "files", "calls"), [(perceptron, 1, 8, 36), (cnn_with_norm, 3, 10, 137)]
)
def test_a_steady_step_touches_no_more_than_before(build, devices, files, calls, monkeypatch):
    model = keras.Sequential(build())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"])
    lockstep.distribute(model, devices)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 8, 8, 1)).astype("float32"), rng.integers(0, 10, 48)
    model.fit(x, y, batch_size=6, shuffle=False, verbose=0)  # compiled
    seen = []

    def profile(frame, event, argument):
        if event == "call":
            seen.append(frame.f_code.co_filename)

    plain, batches = Callbacks.on_train_batch_begin, []

    def begin(self, batch, logs=None):
        batches.append(batch)
        sys.setprofile(profile if batch == 4 else None)
        return plain(self, batch, logs)

    monkeypatch.setattr(Callbacks, "on_train_batch_begin", begin)
    try:
        model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
    finally:
        sys.setprofile(None)
    assert batches == list(range(8))
    mine = {file for file in seen if file.startswith(SOURCE)}
    assert 4 < len(mine) <= files, sorted(mine)
    assert len(seen) <= calls, len(seen)
