"""A conformance case: a model, its data, and what is done with them, written once."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import keras
import numpy as np

from tests.conformance.stock import every_loss_counted

BOUND = 1e-5
"""What two runs may differ by: rounding of float32 at magnitude one, over 20 steps."""


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


LEARNED, EVERYTHING = ("weights", "optimizer"), ""


def fitted_with(**options):
    return partial(on_arrays, **options)


@dataclass(frozen=True)
class Case:
    """A model, its data, and what is done with them.

    Attributes:
        make: Builds the compiled model for these sizes.
        data: Draws `(x, y)` or `(x, y, weight)` with so many rows.
        live: Trains and uses the model; what it returns is compared, and the weights.
        control: What is bounded by a control run on one device: `LEARNED` or
            `EVERYTHING`. For optimizers that divide a gradient by its
            own size, and for half precision.
        make_plain: As `make`, for the control, without what is random in it.
        sizes: What the model makes of the sizes that are asked for.
        unsplit: Whether lockstep says that a batch was not fully split.
    """

    make: Callable
    data: Callable = PLAIN
    live: Callable = on_arrays
    control: str | tuple[str, ...] | None = None
    make_plain: Callable | None = None
    sizes: Callable = lambda sizes: sizes
    unsplit: bool = False


def play(case, distribute=None, *, before=None, sizes=RAGGED, order=None):
    """Everything a user could compare, by name, after one run of a case.

    `distribute` None is Keras alone. `before` runs before the model is made. `order` puts
    the rows of each batch in another order.
    """
    keras.utils.clear_session(free_memory=False)  # to collect garbage takes as long as to train
    keras.utils.set_random_seed(11)
    if before is not None:
        before()
    sizes = case.sizes(sizes)
    rng = np.random.default_rng(3)
    training, held_out = case.data(sizes.rows, rng), case.data(sizes.held_out, rng)
    if order is not None:
        turned = partial(_in_order, batch=sizes.batch, order=order)
        training, held_out = keras.tree.map_structure(turned, (training, held_out))
    model = case.make(sizes)
    if distribute is not None:
        distribute(model)
    with nullcontext() if distribute is not None else every_loss_counted():
        outcome = case.live(model, training, held_out, sizes)
    if order is not None:
        back = partial(_in_order, batch=sizes.batch, order=lambda rows: np.argsort(order(rows)))
        outcome["predict"] = keras.tree.map_structure(back, outcome["predict"])
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


def control(case, one, *, sizes=RAGGED):
    """How far rounding alone takes one device from itself, by name.

    Two runs whose batches differ in nothing but the order of their rows; without
    random numbers, which would fall on other rows.
    """
    if case.make_plain is not None:
        case = replace(case, make=case.make_plain)
        one = play(case, sizes=sizes)
    # In half precision chance has so large a part in it that one other order tells little.
    orders = ORDERS if case.control == EVERYTHING else ORDERS[:1]
    every = [gaps(one, play(case, sizes=sizes, order=order)) for order in orders]
    return {name: max(far[name] for far in every) for name in one}


def bounds(case, one, *, sizes=RAGGED):
    """How far apart two runs of this case may be, by name."""
    allowed = dict.fromkeys(one, BOUND)
    if case.control is None:
        return allowed
    far = control(case, one, sizes=sizes)
    if case.control == EVERYTHING:
        # Half precision: a number may happen to round alike twice. Its kind does not.
        kinds = {name: name.split("/")[0] for name in far}
        far = {n: max(far[m] for m in far if kinds[m] == kinds[n]) for n in far}
    return allowed | {
        name: max(BOUND, 10 * gap) for name, gap in far.items() if name.startswith(case.control)
    }


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


def _in_order(array, batch, order):
    parts = [array[start : start + batch] for start in range(0, len(array), batch)]
    return np.concatenate([part[order(len(part))] for part in parts])


def _shuffled(seed):
    return lambda rows: np.random.default_rng(seed).permutation(rows)


ORDERS = (lambda rows: np.arange(rows)[::-1], _shuffled(1), _shuffled(2))
"""Orders of the rows of a batch that are not the one they have."""
