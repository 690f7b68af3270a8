"""A conformance case: a model, its data, and what is done with them, written once."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import keras
import numpy as np

from tests.conformance.stock import every_loss_counted

BOUND = 1e-10
"""The largest difference of two runs in float64, at magnitude one, over 20 steps.

Rounding gives about 1e-15. In float32 it gives up to 1e-4 where a ReLU or a max pooling has
a kink, or Adam a gradient near zero: no bound there tells rounding from a fault.
"""


@dataclass(frozen=True)
class Sizes:
    """How many rows a case trains on, in which batches, and how many are held out."""

    batch: int = 11
    rows: int = 212
    held_out: int = 23


RAGGED = Sizes()
"""20 steps; no batch divides, and the last one has fewer rows than there are devices."""

EVEN = Sizes(batch=8, rows=160, held_out=24)
"""20 steps that divide over 1, 2, 4 and 8 devices, for tools that need it."""


def whole_batches(sizes):
    """For models that know their batch size: no partial batch anywhere."""
    return Sizes(sizes.batch, sizes.rows // sizes.batch * sizes.batch, 2 * sizes.batch)


def features(*shape):
    return lambda rows, rng: rng.normal(size=(rows, *shape)).astype("float32")


def classes(count):
    return lambda rows, rng: rng.integers(0, count, rows)


def weighted(rows, rng):
    """Weights of every kind: large, small, and zero."""
    return (rng.uniform(0, 2, rows) * (rng.uniform(size=rows) > 0.2)).astype("float32")


def rows_of(*parts):
    """Data made of parts, `(x, y)` or `(x, y, weight)`, each drawn for itself."""
    return lambda rows, rng: tuple(part(rows, rng) for part in parts)


PLAIN = rows_of(features(4), features(2))


def on_arrays(model, training, held_out, sizes, *, in_batches=False, **options):
    """Fit, evaluate and predict on arrays; what the calls gave back.

    The held-out rows go in one batch, which costs one compilation, or `in_batches`.
    """
    options = {"batch_size": sizes.batch, "shuffle": False, "verbose": 0, **options}
    batch = sizes.batch if in_batches else sizes.held_out
    named = ("x", "y", "sample_weight")
    training, held_out = (dict(zip(named, rows, strict=False)) for rows in (training, held_out))
    return {
        "fit": model.fit(**training, **options).history,
        "evaluate": model.evaluate(**held_out, batch_size=batch, verbose=0, return_dict=True),
        "predict": model.predict(held_out["x"], batch_size=batch, verbose=0),
    }


def fitted_with(**options):
    return partial(on_arrays, **options)


@dataclass(frozen=True)
class Case:
    """A model, its data, and what is done with them.

    Attributes:
        make: Builds the compiled model for these sizes.
        data: Draws `(x, y)` or `(x, y, weight)` with so many rows.
        live: Trains and uses the model; what it returns is compared, and the weights.
        bound: How far apart two runs in float64 may be. Half precision needs more.
        make_plain: As `make`, without random numbers, for PyTorch, whose replicas draw their own.
        sizes: What the model makes of the sizes that are asked for.
    """

    make: Callable
    data: Callable = PLAIN
    live: Callable = on_arrays
    bound: float = BOUND
    make_plain: Callable | None = None
    sizes: Callable = lambda sizes: sizes

    def __reduce__(self):
        """A table of cases is no state of a model's code: it would go to each worker, each step."""
        raise TypeError("a case stays in the process of the tests")


def play(case, distribute=None, *, before=None, sizes=RAGGED):
    """Everything a user could compare, by name, after one run of a case.

    `distribute` None is Keras alone. `before` runs before the model is made.
    """
    keras.utils.clear_session(free_memory=False)  # to collect garbage takes as long as to train
    keras.utils.set_random_seed(11)
    if before is not None:
        before()
    sizes = case.sizes(sizes)
    rng = np.random.default_rng(3)
    training, held_out = case.data(sizes.rows, rng), case.data(sizes.held_out, rng)
    model = case.make(sizes)
    if distribute is not None:
        distribute(model)
    with nullcontext() if distribute is not None else every_loss_counted():
        outcome = case.live(model, training, held_out, sizes)
    found = {
        "/".join(map(str, (part, *path))): np.asarray(leaf)
        for part, tree in outcome.items()
        for path, leaf in keras.tree.flatten_with_path(tree)
    }
    for part, variables in (("weights", model.variables), ("optimizer", _slots(model))):
        for position, variable in enumerate(variables):
            value = keras.ops.convert_to_numpy(variable.value)
            found[f"{part}/{position}/{variable.path}"] = value
    return found


def gaps(a, b):
    """The largest absolute difference of everything two runs left behind, by name."""
    assert a.keys() == b.keys()
    return {name: _gap(a[name], b[name]) for name in a}


def _gap(a, b):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if a.dtype.kind in "iub":
        return float(np.any(a != b))
    return float(np.max(np.abs(a.astype("float64") - b.astype("float64")), initial=0.0))


def _slots(model):
    return model.optimizer.variables if model.optimizer is not None else []
