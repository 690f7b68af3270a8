"""What `test_a_gpu.py` runs in a process of its own that sees the GPUs.

python -m tests.every_backend.on_a_gpu

One GPU under lockstep leaves what stock Keras leaves on it: numbers, files and what goes on from
them. In double precision, where rounding hides no fault.
"""

import tempfile
from pathlib import Path

import keras
import numpy as np

import lockstep
from lockstep.keras_compat import compute_in_float64
from tests.conformance.zoo import OPTIMIZERS, ZOO

BOUND = 1e-10
ROWS = 23  # the last batch has fewer rows


def built(case, optimizer, **options):
    keras.utils.clear_session(free_memory=False)  # the same names
    keras.utils.set_random_seed(3)
    model = case.build(case.dropout)
    model.compile(OPTIMIZERS[optimizer](), case.loss, metrics=case.metrics, **options)
    return model


def left_by(model, x, y, **options):
    history = model.fit(x, y, batch_size=6, epochs=3, verbose=0, **options).history
    return [
        history,
        model.evaluate(x, y, batch_size=6, verbose=0),
        model.predict(x, batch_size=6, verbose=0),
        [np.array(variable.numpy()) for variable in model.variables],
    ]


def difference(one, other):
    """The largest difference of two results of one structure."""
    parts = zip(keras.tree.flatten(one), keras.tree.flatten(other), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max(initial=0)) for a, b in parts)


def check_numbers():
    """Every model of the zoo: `fit`, `evaluate`, `predict`, weights."""
    for name, case in ZOO.items():
        x, y = case.data(ROWS, np.random.default_rng(1))
        optimizer = case.optimizers[-1]
        stock = left_by(built(case, optimizer), x, y)
        model = lockstep.distribute(built(case, optimizer), devices="gpu:0")
        found = difference(stock, left_by(model, x, y))
        print(f"{name:28} {optimizer:6} {found:.1e}", flush=True)
        assert found <= BOUND, (name, optimizer, found)


def check_files():
    """A run that resumes equals one that was not interrupted; the file is the model."""
    case = ZOO["mlp"]
    x, y = case.data(ROWS, np.random.default_rng(1))

    def left_after(epochs, run):
        model = lockstep.distribute(built(case, "adamw"), devices="gpu:0")
        callbacks = [lockstep.Checkpoint(run)]
        model.fit(x, y, batch_size=6, epochs=epochs, verbose=0, callbacks=callbacks)
        return model, model.predict(x, batch_size=6, verbose=0)

    with tempfile.TemporaryDirectory() as folder:
        _, uninterrupted = left_after(3, Path(folder) / "whole")
        left_after(2, Path(folder) / "resumed")
        model, resumed = left_after(3, Path(folder) / "resumed")
        model.save(Path(folder) / "model.keras")
        loaded = keras.models.load_model(Path(folder) / "model.keras")
    assert difference(uninterrupted, resumed) <= BOUND
    assert difference(resumed, loaded.predict(x, batch_size=6, verbose=0)) <= BOUND


if __name__ == "__main__":
    compute_in_float64()
    check_numbers()
    check_files()
