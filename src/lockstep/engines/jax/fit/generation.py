"""`generate` of a language model: each device writes the texts of its prompts.

A model of KerasHub compiles one program that generates. It is called with the prompts of a batch,
and has its variables on every device. If the prompts are on every device too, each device writes
all of the texts. Here they are split by rows, and XLA splits the program: its results are the same.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import numpy as np

from lockstep.engines.jax.parts.row_draws import UnknownDraw, check_prng
from lockstep.engines.jax.steps.programs import Programs

HOOK = "make_generate_function"
"""The method that returns the function that generates: KerasHub calls it in each `generate`."""


def generating_by_rows(model: Any, programs: Programs) -> Callable[[], Callable[..., Any]]:
    """Return the model's `make_generate_function`, whose function splits prompts by rows.

    Rows that the number of devices does not divide stay whole: with other rows beside them, a
    sampler would draw other numbers.

    Args:
        model: The model.
        programs: Its steps over the mesh.
    """
    make: Callable[[], Callable[..., Any]] = getattr(model, HOOK)

    @wraps(make)
    def make_generate_function() -> Callable[..., Any]:
        function = make()

        @wraps(function)
        def generate(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = jax.tree.flatten((args, kwargs))
            rows = next((leaf.shape[0] for leaf in leaves if _has_rows(leaf)), 0)
            if rows and programs.divides(rows) and not model.run_eagerly and _draws_alike():
                leaves = [
                    jax.device_put(leaf, programs.by_rows)
                    if _has_rows(leaf) and leaf.shape[0] == rows
                    else leaf
                    for leaf in leaves
                ]
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return function(*args, **kwargs)

        return generate

    return make_generate_function


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim > 0


def _draws_alike() -> bool:
    """Return whether a program draws the same numbers where it is split."""
    try:
        check_prng()
    except UnknownDraw:
        return False
    return True
