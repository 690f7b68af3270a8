"""Training runs, and how far two of them are apart."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import keras
import numpy as np

import lockstep
from tests.conformance.stock import every_loss_counted
from tests.conformance.zoo import OPTIMIZERS, ZOO

ROWS = 197  # 20 steps of 10, the last of 7
HELD_OUT = 23
BATCH = 10


@dataclass(frozen=True)
class Run:
    """What a run leaves: everything a user could compare."""

    variables: dict[str, np.ndarray]
    history: dict[str, list[float]]
    evaluated: dict[str, float]
    predicted: list[np.ndarray]


@lru_cache(maxsize=8)
def run(name, optimizer, devices, *, dropout=True, reverse=False):
    """Train the zoo's model `name`; `devices` None is Keras alone, on one device."""
    with nullcontext() if devices is not None else every_loss_counted():
        return _run(name, optimizer, devices, dropout, reverse)


def _run(name, optimizer, devices, dropout, reverse):
    case = ZOO[name]
    keras.utils.clear_session()
    keras.utils.set_random_seed(11)
    model = case.build(case.dropout if dropout else 0.0)
    if devices is not None:
        lockstep.distribute(model, devices)
    model.compile(OPTIMIZERS[optimizer](), case.loss, metrics=case.metrics)
    rng = np.random.default_rng(3)
    x, y = case.data(ROWS, rng)
    held_out = case.data(HELD_OUT, rng)
    if reverse:
        x, y = keras.tree.map_structure(_reverse_rows_of_batches, (x, y))
    history = model.fit(
        x, y, batch_size=BATCH, shuffle=False, verbose=0, validation_data=held_out
    ).history
    return Run(
        variables=snapshot(model),
        history=history,
        evaluated=model.evaluate(*held_out, batch_size=9, verbose=0, return_dict=True),
        predicted=keras.tree.flatten(model.predict(held_out[0], batch_size=9, verbose=0)),
    )


def snapshot(model):
    """Every variable of the model and its optimizer, by path."""
    named = [(v.path, v) for v in model.variables]
    named += [(f"optimizer/{v.path}", v) for v in model.optimizer.variables]
    return {path: np.asarray(variable.value) for path, variable in named}


def distances(a, b):
    """The largest absolute difference of each variable of two runs."""
    assert a.keys() == b.keys()
    return {path: _distance(a[path], b[path]) for path in a}


def rounding(name, optimizer):
    """How far rounding alone takes each variable, and each prediction, of one device from itself.

    Two runs on one device, without dropout, differ in nothing but the order of the
    rows inside each batch. Adam divides a gradient by its own size, so where the
    gradient is mathematically zero it turns rounding into steps.
    """
    plain = run(name, optimizer, None, dropout=False)
    reversed_ = run(name, optimizer, None, dropout=False, reverse=True)
    pairs = zip(plain.predicted, reversed_.predicted, strict=True)
    predicted = [_distance(mine, theirs) for mine, theirs in pairs]
    return distances(plain.variables, reversed_.variables), predicted


def _distance(a, b):
    if a.dtype.kind in "iub":
        return float(np.any(a != b))
    return float(np.max(np.abs(a.astype("float64") - b.astype("float64")), initial=0.0))


def _reverse_rows_of_batches(array):
    parts = [array[start : start + BATCH][::-1] for start in range(0, len(array), BATCH)]
    return np.concatenate(parts)
