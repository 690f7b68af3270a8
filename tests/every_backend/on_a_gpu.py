"""What `test_a_gpu.py` and `benchmarks/gpu_check.py` run in processes that see GPUs.

python -m tests.every_backend.on_a_gpu
LOCKSTEP_SHARE_GPU=2 python -m tests.every_backend.on_a_gpu --devices 2 --state sharded

GPUs under lockstep leave what stock Keras leaves on one of them: numbers, files and what goes on
from them. In double precision, where rounding hides no fault. With one GPU of a process, the
processes of a launcher are the devices.
"""

import argparse
import tempfile
from pathlib import Path

import keras
import numpy as np

import lockstep
from lockstep.keras_compat import compute_in_float64
from tests.conformance.stock import every_loss_counted
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


def left_by_keras(model, x, y, **options):
    """What `left_by` returns for a model of Keras alone, which drops added losses at random."""
    with every_loss_counted():
        return left_by(model, x, y, **options)


def difference(one, other):
    """The largest difference of two results of one structure."""
    parts = zip(keras.tree.flatten(one), keras.tree.flatten(other), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max(initial=0)) for a, b in parts)


LOOKS_ACROSS_ROWS = ("cnn", "bias_before_norm", "subclassed")
"""Models with batch normalization, which has no micro-batches."""


def check_numbers(names, devices, traced=False, **options):
    """Models of the zoo: `fit`, `evaluate`, `predict`, weights; on PyTorch also by traced steps."""
    for name in names:
        case = ZOO[name]
        x, y = case.data(ROWS, np.random.default_rng(1))
        optimizer = case.optimizers[-1]
        stock = left_by_keras(built(case, optimizer), x, y)
        model = lockstep.distribute(built(case, optimizer), devices, **options)
        model.jit_compile = traced or model.jit_compile
        found = difference(stock, left_by(model, x, y))
        print(f"{name:28} {optimizer:6} {found:.1e}", flush=True)
        assert found <= BOUND, (name, optimizer, found)


def check_files(devices):
    """A run that resumes on another number of devices equals one that was not interrupted."""
    case = ZOO["mlp"]
    x, y = case.data(ROWS, np.random.default_rng(1))

    def left_after(epochs, run, devices):
        model = lockstep.distribute(built(case, "adamw"), devices)
        callbacks = [lockstep.Checkpoint(run)]
        model.fit(x, y, batch_size=6, epochs=epochs, verbose=0, callbacks=callbacks)
        return model, model.predict(x, batch_size=6, verbose=0)

    with tempfile.TemporaryDirectory() as folder:
        _, uninterrupted = left_after(3, Path(folder) / "whole", devices)
        left_after(2, Path(folder) / "resumed", devices)
        model, resumed = left_after(3, Path(folder) / "resumed", 1)
        model.save(Path(folder) / "model.keras")
        loaded = keras.models.load_model(Path(folder) / "model.keras")
    assert difference(uninterrupted, resumed) <= BOUND
    assert difference(resumed, loaded.predict(x, batch_size=6, verbose=0)) <= BOUND


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=ZOO, default=[*ZOO])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--state", default="replicated")
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--traced", action="store_true", help="on PyTorch, jit_compile=True")
    given = parser.parse_args()
    compute_in_float64()
    is_launched = lockstep.initialize()[1] > 1
    several = None if is_launched else given.devices
    options = {"state": given.state}
    if given.micro_batch_size:
        options = {"micro_batch_size": given.micro_batch_size}
        given.models = [each for each in given.models if each not in LOOKS_ACROSS_ROWS]
    check_numbers(given.models, several, traced=given.traced, **options)
    if not is_launched and not given.micro_batch_size:  # processes would have a folder each
        check_files(several)
