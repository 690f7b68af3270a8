"""Finds out, by trying, which layers of the user's own work row by row.

A layer passes where a row of what it gives, and of the gradient it hands back, does
not change when the other rows change, when there are fewer of them, or when there are
none; where it leaves the same variables behind for few rows as for many; and where it
adds no loss. All else stays with the global batch, which is exact for any layer. What
a trial cannot see is a layer that treats rows differently by their number, from more
rows on than are tried.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lockstep.engines.tensorflow_rows import is_batch_norm
from lockstep.engines.tensorflow_variables import shared_seeds

ROWS = 13  # no usual size of anything else, which tells a tensor of rows from others
_SHARDS = (slice(0, 4), slice(4, 5), slice(5, ROWS))


def passing(model: Any, candidates: list[Any], inputs: Any, variables: list[Any]) -> list[Any]:
    """Those of `candidates`, parts of `model` or itself, that work row by row.

    Args:
        model: A built model; it is called, and is afterwards what it was.
        candidates: Layers and operations that nothing is known about.
        inputs: Its inputs, or their specification.
        variables: Every variable that a call may change.
    """
    candidates = [part for part in candidates if not _meets_in_a_loop(part)]
    if not candidates:
        return []
    variables = [*variables, *shared_seeds()]
    before = _values(variables)
    try:
        with _quiet_norms(model), _untouched_random_numbers():
            calls = _recorded(model, candidates, inputs)
            return [
                part
                for part in candidates
                if part in calls and _passes(part, *calls[part], variables, before)
            ]
    finally:
        _restore(variables, before)
        model._clear_losses()


def _meets_in_a_loop(part: Any) -> bool:
    """Whether there is batch norm where replicas could not meet: inside a wrapper's loop."""
    if not isinstance(part, keras.layers.Layer):
        return False
    wrappers = (keras.layers.RNN, keras.layers.Wrapper, keras.layers.StackedRNNCells)
    return any(
        isinstance(layer, wrappers) and any(is_batch_norm(i) for i in layer._flatten_layers())
        for layer in part._flatten_layers()
    )


# ------------------------------------------------------------------------- calling


def _recorded(model: Any, parts: list[Any], inputs: Any) -> dict[Any, tuple[Any, Any]]:
    """What each part is called with, when the model is called with made-up rows."""
    numbers = np.random.default_rng(0)
    calls: dict[Any, tuple[Any, Any]] = {}

    def recording(part: Any) -> Any:
        call = part.call

        def record(*args: Any, **kwargs: Any) -> Any:
            calls.setdefault(part, (args, kwargs))
            return call(*args, **kwargs)

        return record

    hooks = {part: recording(part) for part in parts}
    for part, hook in hooks.items():
        vars(part)["call"] = hook
    try:
        model(keras.tree.map_structure(lambda leaf: _made_up(leaf, numbers), inputs))
    except Exception:  # whatever it is, the model does not take so many rows
        return {}
    finally:
        for part in parts:
            del vars(part)["call"]
    return calls


def _made_up(leaf: Any, numbers: np.random.Generator) -> Any:
    if leaf is None:
        return None
    shape = (ROWS, *(16 if dim is None else dim for dim in tuple(leaf.shape)[1:]))
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    if keras.backend.is_float_dtype(dtype):
        return tf.cast(numbers.uniform(size=shape), dtype)
    return tf.cast(numbers.integers(0, 2, shape), dtype)


@contextmanager
def _untouched_random_numbers() -> Iterator[None]:
    """Whatever is drawn inside, what is drawn afterwards is as if it had not been."""
    python, numpy, had_seeds = random.getstate(), np.random.get_state(), bool(shared_seeds())
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if not had_seeds:
            # keras/src/random/seed_generator.py, global_seed_generator
            state = keras.src.backend.common.global_state
            state.set_global_attribute("global_seed_generator", None)


@contextmanager
def _quiet_norms(model: Any) -> Iterator[None]:
    """While it lasts, batch norm takes zero and one for moments: it is known already."""
    norms = [layer for layer in model._flatten_layers() if is_batch_norm(layer)]
    with ExitStack() as stack:
        for layer in norms:
            shape = layer.moving_mean.shape
            vars(layer)["_moments"] = partial(_no_moments, shape)
            stack.callback(vars(layer).pop, "_moments")
        yield


def _no_moments(shape: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
    rows = {ROWS} | {shard.stop - shard.start for shard in _SHARDS}
    if inputs.shape[0] not in rows:
        raise ValueError("The rows were merged with another dim on the way here.")
    return tf.zeros(shape), tf.ones(shape)


def _values(variables: list[Any]) -> list[Any]:
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


def _restore(variables: list[Any], values: list[Any]) -> None:
    for variable, now, value in zip(variables, _values(variables), values, strict=True):
        if not np.array_equal(now, value):
            variable.assign(value)


# ------------------------------------------------------------------------- comparing


def _passes(part: Any, args: Any, kwargs: Any, variables: list[Any], before: list[Any]) -> bool:
    def run(call: Any, training: bool, rows: int = ROWS) -> tuple[Any, Any, list[Any]]:
        _restore(variables, before)
        outputs, gradients = _call(part, *call, training=training, rows=rows)
        return outputs, gradients, _values(variables)

    call = (args, kwargs)
    try:
        for training in (False, True):
            whole = run(call, training)
            if isinstance(part, keras.layers.Layer) and _adds_loss(part):
                return False
            if not all(_finite_rows(leaf) for leaf in whole[0]):
                return False
            draws = _drew(variables, before, whole[2])
            for shard in _SHARDS:
                other = run(_other_rows_changed(call, shard), training)
                if not _same(whole[:2], other[:2], shard, shard):
                    return False
                inside = slice(0, shard.stop - shard.start)
                part_of = run(_only(call, shard), training, inside.stop)
                if not _same_values(whole[2], part_of[2]):
                    return False
                if not draws and not _same(whole[:2], part_of[:2], shard, inside):
                    return False
    except Exception:  # a part that fails on some rows is not one that works by rows
        return False
    return True


def _call(
    part: Any, args: Any, kwargs: Any, *, training: bool, rows: int
) -> tuple[list[Any], list[Any]]:
    """The outputs, and the gradients of the inputs for a gradient that is made up."""
    kwargs = dict(kwargs)
    if isinstance(part, keras.layers.Layer):
        kwargs["training"] = training
    sources = [leaf for leaf in keras.tree.flatten((args, kwargs)) if _is_rows(leaf, rows)]
    sources = [leaf for leaf in sources if leaf.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        outputs = [leaf for leaf in keras.tree.flatten(part(*args, **kwargs)) if tf.is_tensor(leaf)]
        # Each row of the gradient depends on that row of the output, as that of a loss does.
        sums = [tf.reduce_sum(tf.sin(o)) for o in outputs if o.dtype.is_floating]
    gradients = tape.gradient(sums, sources) if sums and sources else []
    return outputs, [tf.convert_to_tensor(g) for g in gradients if g is not None]


def _is_rows(leaf: Any, rows: int = ROWS) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0 and leaf.shape[0] == rows


def _only(call: Any, shard: slice) -> Any:
    return keras.tree.map_structure(lambda leaf: leaf[shard] if _is_rows(leaf) else leaf, call)


def _other_rows_changed(call: Any, shard: slice) -> Any:
    def change(leaf: Any) -> Any:
        if not _is_rows(leaf):
            return leaf
        if leaf.dtype.is_floating:
            changed = 1 - 3 * tf.reverse(leaf, axis=[0])
        else:
            changed = tf.roll(leaf, 1, axis=0) if leaf.dtype != tf.bool else leaf
        return tf.concat([changed[: shard.start], leaf[shard], changed[shard.stop :]], axis=0)

    return keras.tree.map_structure(change, call)


def _same(one: Any, other: Any, shard: slice, inside: slice) -> bool:
    """Whether outputs and gradients agree, in `shard` of one and `inside` of the other."""
    for mine, theirs in zip(one, other, strict=True):
        if len(mine) != len(theirs):
            return False
        for a, b in zip(mine, theirs, strict=True):
            if not _is_rows(a) or b.shape[0] < inside.stop:
                return False
            if inside != shard and b.shape[0] != inside.stop:
                return False
            if not _close(a[shard].numpy(), b[inside].numpy()):
                return False
    return True


def _same_values(one: list[Any], other: list[Any]) -> bool:
    return all(_close(a, b) for a, b in zip(one, other, strict=True))


def _close(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind in "iub" or a.dtype.kind not in "fV":
        return bool(np.array_equal(a, b))
    a, b = a.astype("float64"), b.astype("float64")
    scale = max(1.0, float(np.max(np.abs(a), initial=0.0)))
    return a.shape == b.shape and bool(np.all(np.abs(a - b) <= 1e-5 * scale))


def _finite_rows(leaf: Any) -> bool:
    if not _is_rows(leaf):
        return False
    return not leaf.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(leaf)))


def _drew(variables: list[Any], before: list[Any], after: list[Any]) -> bool:
    """Whether random numbers were drawn, which fall differently on fewer rows."""
    return any(
        variable.path.endswith("seed_generator_state") and np.any(old != new)
        for variable, old, new in zip(variables, before, after, strict=True)
    )


def _adds_loss(layer: Any) -> bool:
    # keras/src/layers/layer.py, Layer.add_loss
    return any(inner._losses for inner in layer._flatten_layers())
