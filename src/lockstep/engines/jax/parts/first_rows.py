"""The check of the first rows: a model gives the same for them at once and in two parts.

The row trace proves that a model works row by row. Where it takes something on trust, this check
compares outputs, losses, changed variables and, in training, gradients, with the values of the
first batch of each form and before the first update.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep.core.micro_batches import rows_differ
from lockstep.engines.replicas.sketches import Bounds, bounds_for
from lockstep.keras_compat import get_keras_mask, takes_training

StatelessCall = Callable[..., tuple[Any, ...]]
Pair = tuple[Any, Any]
"""The distance of two values, and their size."""


def compare_first_rows(
    model: Any,
    at_once: StatelessCall,
    in_parts: StatelessCall,
    first_rows: Callable[[Any], Any],
    values: tuple[Any, Any, Any],
    size: int,
    trains: bool,
) -> None:
    """Raise if a model gives other results for the first rows in parts than at once.

    Args:
        model: The model.
        at_once: Its `stateless_call`.
        in_parts: The same in two parts of the rows.
        first_rows: Returns the first rows of a batch, inside the program.
        values: The values of the trainable variables, of the other variables, and the batch.
        size: The micro-batch size, for the message.
        trains: Whether the step trains.

    Raises:
        UnsupportedModel: If they differ by more than rounding.
    """

    def distances(trainable: Any, others: Any, x: Any) -> dict[str, list[Any]]:
        given = trainable, others, first_rows(x)
        return _distances(model, at_once, in_parts, trains, *given)

    compare = jax.jit(distances)
    with jax.default_matmul_precision("highest"):
        found = jax.tree.map(_on_host, compare(*values))
    bounds = bounds_for(model, ())
    of_all = max((size for _, size in found["gradients"]), default=0.0)
    for what in ("outputs", "losses", "variables", "gradients"):
        for distance, length in found[what]:
            allowed = _allowed(bounds, what, length, of_all)
            if not distance <= allowed:
                raise rows_differ(model, size, what, float(distance))


def _allowed(bounds: Bounds, what: str, length: Any, of_all: Any) -> float:
    if what == "gradients":
        return float(bounds.gradient * length + bounds.of_all * of_all)
    return float(bounds.value * length)


def _on_host(value: Any) -> np.ndarray:
    return np.asarray(value.addressable_data(0))


def _distances(
    model: Any,
    at_once: StatelessCall,
    in_parts: StatelessCall,
    trains: bool,
    trainable: Any,
    others: Any,
    x: Any,
) -> dict[str, list[Any]]:
    # keras/src/backend/jax/trainer.py, JAXTrainer.compute_loss_and_updates
    kwargs = {"training": trains} if takes_training(model) else {}

    def results(run: StatelessCall, trainable: Any) -> tuple[Any, Any]:
        outputs, after, losses = run(trainable, others, x, return_losses=True, **kwargs)
        leaves = [each for each in keras.tree.flatten(outputs) if isinstance(each, jax.Array)]
        masks = [get_keras_mask(each) for each in leaves]
        total = sum((jnp.sum(each) for each in losses), start=jnp.zeros(()))
        total += sum(_product(each) for each in leaves if jnp.issubdtype(each.dtype, jnp.floating))
        return total, {"outputs": [leaves, masks], "losses": losses, "variables": after}

    if not trains:
        (_, one), (_, two) = results(at_once, trainable), results(in_parts, trainable)
        return {name: _pairs(one[name], two[name]) for name in one} | {"gradients": []}
    found, sketches = [], []
    for run in (at_once, in_parts):
        gradient = jax.grad(partial(results, run), has_aux=True)
        gradients, result = gradient(trainable)
        found.append(result)
        sketches.append([_sketch(each) for each in gradients])
    pairs = [(jnp.max(jnp.abs(one - two)), one[0]) for one, two in zip(*sketches, strict=True)]
    one, two = found
    return {name: _pairs(one[name], two[name]) for name in one} | {"gradients": pairs}


def _pairs(one: Any, two: Any) -> list[Any]:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return [_pair(*each) for each in pairs if each[0].size]


def _pair(one: Any, two: Any) -> Any:
    exact = jnp.promote_types(one.dtype, jnp.float32)
    same = (one == two) | ((one != one) & (two != two))
    one, two = one.astype(exact), two.astype(exact)
    finite = jnp.where(jnp.isfinite(one), jnp.abs(one), 0)
    return jnp.max(jnp.where(same, 0, jnp.abs(one - two))), jnp.max(finite)


def _product(array: Any) -> Any:
    """Return the sum of an array times numbers that differ from row to row."""
    flat = array.astype(jnp.promote_types(array.dtype, jnp.float32)).reshape(-1)
    return jnp.sum(flat * jnp.cos(1.7 * jnp.arange(flat.size) + 0.3))


def _sketch(array: Any) -> Any:
    """Return the norm of a gradient and two of its products: a whole one need not be kept."""
    flat = array.astype(jnp.promote_types(array.dtype, jnp.float32)).reshape(-1)
    places = jnp.arange(flat.size)
    products = [jnp.sum(flat * jnp.cos(1.7 * places)), jnp.sum(flat * jnp.sin(0.9 * places + 0.4))]
    return jnp.stack([jnp.sqrt(jnp.sum(flat * flat)), *products])
