"""Judges whether code works row by row, by the programs of several runs of the follower."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras

from lockstep.engines.rowwise.followed_tensors import follow
from lockstep.engines.rowwise.follower import Follower, Scratch
from lockstep.engines.rowwise.known_layers import (
    is_batch_norm,
    untouched_random_numbers,
)
from lockstep.engines.rowwise.rules import (
    NotRowByRow,
    Reasons,
    has_unknown_dims,
    in_words,
    shape_of,
)
from lockstep.keras_compat import (
    clear_losses,
    get_keras_mask,
    global_seed_generator,
    layers_in,
    set_keras_mask,
    takes_training,
)


def refused(
    model: Any,
    parts: list[Any],
    inputs: Any,
    *,
    training: bool,
    scratch: Callable[[], Scratch],
    draws_together: bool = False,
) -> Reasons:
    """Return the `parts` that are not known to work row by row, with the reasons.

    Args:
        model: A built model. Its values do not change.
        parts: Layers and operations that the model calls, or the model itself.
        inputs: The inputs of the model, or their specification.
        training: Whether the model is called in training mode.
        scratch: Makes the place where the backend computes in one run.
        draws_together: Whether each row has the random numbers of one device.
    """

    def run(stand_in: int, rows: int | None) -> Follower:
        follower = Follower(parts, scratch(), rows, layers_in(model))
        follower.draws_together = draws_together
        x = keras.tree.map_structure(partial(_symbol, stand_in=stand_in, rows=rows), inputs)
        options = {"training": training} if takes_training(model) else {}
        with follower.following():
            model(x, **options)
        return follower

    reasons = {id(part): _LOOPS for part in parts if _meets_in_a_loop(part)}
    try:
        with untouched_random_numbers():
            runs = [run(*numbers) for numbers in _numbers(_rows_in(inputs))]
        if runs[0].draws_without_seed:
            global_seed_generator()  # a replica could not create its variable
    except Exception as error:  # any error means that it is not known
        return {id(part): in_words(error) for part in parts}
    finally:
        clear_losses(model)
    dims = has_unknown_dims(inputs)
    for part in parts:
        found = next((run.reasons[id(part)] for run in runs if id(part) in run.reasons), None)
        if found is None and id(part) not in runs[0].programs:
            found = "not called during the analysis"
        found = found or _why_other([run.programs[id(part)] for run in runs], dims)
        if found is not None:
            reasons.setdefault(id(part), found)
    return reasons


def call_refused(
    layer: Any,
    args: Any,
    kwargs: Any,
    *,
    rows: int | None,
    held: list[Any],
    scratch: Callable[[], Scratch],
) -> str | None:
    """Return why one call of a layer is not known to work row by row, else `None`.

    Args:
        layer: A built layer.
        args: The positional arguments of its `call`. The tensors with an unknown first dim
            have rows, the others do not. Only shapes, dtypes and masks are used.
        kwargs: The other arguments.
        rows: The static number of rows on one device, if there is one.
        held: The layers that a shared call treats, with those inside them.
        scratch: Makes the place where the backend computes in one run.
    """

    def run(stand_in: int, rows: int | None) -> Follower:
        follower = Follower([], scratch(), rows, held)
        made: dict[int, Any] = {}

        def symbol(leaf: Any) -> Any:
            if id(leaf) not in made:  # a layer may ask whether two arguments are one tensor
                batch = shape_of(leaf)[:1] == (None,)
                made[id(leaf)] = _symbol(leaf, stand_in=stand_in, rows=rows, batch=batch)
            return made[id(leaf)]

        symbols = keras.tree.map_structure(symbol, (args, kwargs))
        with follower.following():
            follower.check_outputs(follower.inside_layer(layer, *symbols))
            follower.programs[0] = follower.program_since(0)
        return follower

    if _meets_in_a_loop(layer):
        return _LOOPS
    try:
        return _judged(run, (args, kwargs), rows)
    finally:
        clear_losses(layer)


def function_refused(
    function: Callable[..., Any],
    given: tuple[Any, ...],
    *,
    asks_for_rows: bool = True,
    scratch: Callable[[], Scratch],
) -> str | None:
    """Return why a function is not known to give one value or row for each row, else `None`.

    Args:
        function: A loss, for example, of targets and outputs.
        given: Its arguments. Only shapes, dtypes and masks are used.
        asks_for_rows: Whether the function may depend on the static number of rows.
        scratch: Makes the place where the backend computes in one run.
    """

    def run(stand_in: int, rows: int | None) -> Follower:
        follower = Follower([], scratch(), rows)
        with follower.following():
            x = [_symbol(value, stand_in=stand_in, rows=rows) for value in given]
            follower.check_outputs(function(*x), scalars=False)
            follower.programs[0] = follower.program_since(0)
        return follower

    rows = given[0].shape[0] if asks_for_rows else None
    return _judged(run, given, rows, sees_rows=rows is not None)


def _judged(
    run: Callable[[int, int | None], Any], given: Any, rows: int | None, *, sees_rows: bool = False
) -> str | None:
    """Return why runs fail or differ.

    Args:
        run: Follows the code, given what `_numbers` returns.
        given: The arguments of the code.
        rows: The static number of rows, if there is one.
        sees_rows: Whether the code never runs without a static number of rows.
    """
    try:
        with untouched_random_numbers():
            programs = [run(*numbers).programs[0] for numbers in _numbers(rows)]
    except Exception as error:  # any error means that it is not known
        return in_words(error)
    return _why_other(programs, has_unknown_dims(given), sees_rows=sees_rows)


_STAND_INS = (6, 10)
"""Lengths that stand in for an unknown dim other than the batch, one for each run."""


def _numbers(rows: int | None) -> list[tuple[int, int | None]]:
    """Return the stand-in and the static number of rows of each run.

    Code may see no number of rows, that of the batch, or that of a shard, which may be 1.
    """
    of_rows = [] if rows is None else [1, rows, rows + 1]
    return [(each, None) for each in _STAND_INS] + [(_STAND_INS[0], each) for each in of_rows]


def _why_other(programs: list[Any], dims: bool, *, sees_rows: bool = False) -> str | None:
    """Return why the programs of the runs are not one, `None` if they are.

    Args:
        programs: The program of each run, in the order of `_numbers`.
        dims: Whether unknown dims have stand-ins, so that the first two differ in these.
        sees_rows: See `_judged`.
    """
    first, again, *others = programs
    if not dims and first != again:
        return "a different program at each call"
    if sees_rows:
        first = others[0]
    return LOOKS_AT_ROWS if any(each != first for each in others) else None


LOOKS_AT_ROWS = "it reads the number of rows"


def _rows_in(inputs: Any) -> int | None:
    """Return the static number of rows of the inputs, `None` without one."""
    shapes = [shape_of(leaf) for leaf in keras.tree.flatten(inputs)]
    known = [shape[0] for shape in shapes if shape]
    return known[0] if known else None


_LOOPS = "batch norm in a loop"


def _meets_in_a_loop(part: Any) -> bool:
    """Return whether a wrapper or RNN contains batch norm: replicas cannot sync in its loop."""
    if not isinstance(part, keras.layers.Layer):
        return False
    wrappers = (keras.layers.RNN, keras.layers.Wrapper, keras.layers.StackedRNNCells)
    return any(
        isinstance(layer, wrappers) and any(is_batch_norm(i) for i in layers_in(layer))
        for layer in layers_in(part)
    )


def _symbol(leaf: Any, *, stand_in: int, rows: int | None = None, batch: bool = True) -> Any:
    """Return a symbolic tensor of the shape and dtype of an input, with its mask.

    Args:
        leaf: The input. What is not a tensor is returned as it is.
        stand_in: The length that stands in for an unknown dim other than the first.
        rows: The static number of rows.
        batch: Whether the first dim is the batch.
    """
    if leaf is None or not hasattr(leaf, "dtype") or isinstance(leaf, keras.Variable):
        return leaf
    if not hasattr(leaf, "shape") or type(leaf).__name__.startswith(("Ragged", "Sparse")):
        raise NotRowByRow("ragged or sparse inputs")
    shape: list[int | None] = [stand_in if dim is None else int(dim) for dim in leaf.shape]
    if shape and batch:
        shape[0] = rows
    symbol = follow(keras.KerasTensor(shape, keras.backend.standardize_dtype(leaf.dtype)))
    symbol._lockstep_each = 1 if shape and batch else None
    mask = get_keras_mask(leaf)
    if mask is not None:
        set_keras_mask(symbol, _symbol(mask, stand_in=stand_in, rows=rows, batch=batch))
    return symbol
