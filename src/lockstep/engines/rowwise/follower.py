"""Follows the code of a layer, a loss or a metric on symbolic tensors.

Each tensor carries how its first dim relates to the rows of the batch. Code without a rule is
refused.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FrameType
from typing import Any, Protocol

import keras
import numpy as np

from lockstep.engines.rowwise.followed_tensors import HERE, follow
from lockstep.engines.rowwise.known_layers import (
    MASKS_OF_ROWS,
    OF_ANY_RANK,
    call_name,
    is_batch_norm,
    is_declared,
    is_for_all_rows,
    is_known,
    least_rank,
    stateful_rnns,
    untouched_random_numbers,
)
from lockstep.engines.rowwise.rules import (
    COUNTS_ROWS,
    RULES,
    TAKE_COUNTS,
    NotRowByRow,
    Operand,
    Reasons,
    RowCount,
    aligned,
    counts_in,
    each_of,
    in_attributes,
    is_tensor,
    operands_in,
    options_of,
    reshaped,
    shape_of,
)
from lockstep.keras_compat import (
    clear_losses,
    compute_output_spec,
    get_keras_mask,
    global_seed_generator,
    layers_in,
    module_in_keras,
    seed_generators,
    set_keras_mask,
    symbolic_calls,
    takes_training,
)


class Scratch(Protocol):
    """Where a backend computes what does not depend on the batch, without any effect.

    Attributes:
        kind: The class of tensors in a real call.
        count_kind: The class of a number of rows in a real call.
    """

    kind: Any
    count_kind: Any

    def dtype(self, name: str) -> Any:
        """Return the dtype of this name, as tensors in a real call have it."""

    def open(self) -> AbstractContextManager[Any]:
        """Return the context in which code is followed."""

    def describe(self, tensor: Any) -> Any:
        """Return a description of a tensor of the backend, equal for two runs of the same code.

        Raises:
            NotRowByRow: If the tensor may depend on a batch.
        """

    def cut(self) -> tuple[Any, str | None]:
        """Return what the backend computed since the last call, and why it may not, if so."""


def refused(
    model: Any, parts: list[Any], inputs: Any, *, training: bool, scratch: Callable[[], Scratch]
) -> Reasons:
    """Return the `parts` that are not known to work row by row, with the reasons.

    Args:
        model: A built model. Its values do not change.
        parts: Layers and operations that the model calls, or the model itself.
        inputs: The inputs of the model, or their specification.
        training: Whether the model is called in training mode.
        scratch: Makes the place where the backend computes in one run.
    """

    def run(stand_in: int, rows: int | None) -> _Follower:
        follower = _Follower(parts, scratch(), rows, layers_in(model))
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
        return {id(part): _in_words(error) for part in parts}
    finally:
        clear_losses(model)
    dims = _has_unknown_dims(inputs)
    for part in parts:
        found = next((run.reasons[id(part)] for run in runs if id(part) in run.reasons), None)
        if found is None and id(part) not in runs[0].programs:
            found = "not called while it was followed"
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

    def run(stand_in: int, rows: int | None) -> _Follower:
        follower = _Follower([], scratch(), rows, held)
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

    def run(stand_in: int, rows: int | None) -> _Follower:
        follower = _Follower([], scratch(), rows)
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
        return _in_words(error)
    return _why_other(programs, _has_unknown_dims(given), sees_rows=sees_rows)


_CONSTANTS = (bool, int, float, str, type(None))
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
        return "another program at each call"
    if sees_rows:
        first = others[0]
    return LOOKS_AT_ROWS if any(each != first for each in others) else None


LOOKS_AT_ROWS = "it looks at the number of rows"


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


class _Follower:
    """Follows the rows of symbolic tensors through the calls of one run.

    Attributes:
        reasons: Why a part is refused, by its identity.
        programs: What each part calls, by its identity.
        draws_without_seed: Whether code draws from Keras's global seed generator.
    """

    def __init__(
        self,
        parts: list[Any],
        scratch: Scratch,
        rows: int | None,
        held: Iterable[Any] = (),
    ) -> None:
        """`rows` is the static number of rows; the engine treats the layers in `held`."""
        self.reasons: Reasons = {}
        self.programs: dict[int, Any] = {}
        self.draws_without_seed = False
        self.kind, self.count_kind, self.dtype = scratch.kind, scratch.count_kind, scratch.dtype
        self._parts = {id(part) for part in parts}
        self._rows = rows
        self._held = {id(layer) for layer in held}
        self._held |= {id(seeds) for layer in held for seeds in seed_generators(layer)}
        self._scratch = scratch
        self._program: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps tensors alive, so that no identity is reused
        self._inside = False
        self._failure: str | None = None

    @contextmanager
    def following(self) -> Iterator[None]:
        """Replace what Keras does with symbolic tensors, in this thread."""
        with symbolic_calls(_Hooks), self._scratch.open():
            HERE.follower = self
            try:
                yield
            finally:
                HERE.follower = None

    def program_since(self, start: int) -> Any:
        """Return the calls since a position in the program, and what the backend did."""
        done, failure = self._scratch.cut()
        if self._failure or failure:
            raise NotRowByRow(self._failure or failure)
        return self._program[start:], done

    def check_outputs(self, outputs: Any, *, scalars: bool = True) -> None:
        """Raise if an output, or its mask, does not have one entry for each row of the batch."""
        for leaf in keras.tree.flatten(outputs):
            for tensor in (leaf, get_keras_mask(leaf)):
                if isinstance(tensor, _CONSTANTS):
                    continue
                if not hasattr(tensor, "shape"):  # it may hold a tensor
                    raise NotRowByRow("an output that is no tensor")
                rank, each = len(shape_of(tensor)), each_of(tensor)
                if rank == 0 and each is None and scalars:
                    continue
                if each is None:
                    raise NotRowByRow("an output without rows")
                if each != 1:
                    raise NotRowByRow("rows merged with another dim")

    # ------------------------------------------------------------------- calls of Keras

    def operate(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of an operation of `keras.ops`."""
        if id(op) in self._parts and not self._inside:
            return self._part(op, partial(self._operate, op), args, kwargs)
        return self._operate(op, *args, **kwargs)

    def call_layer(self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the outputs of `Layer.__call__`."""
        if id(layer) in self._parts and not self._inside:
            return self._part(layer, partial(call, layer), args, kwargs)
        return call(layer, *args, **kwargs)

    def inside_layer(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of `Layer.call`: known ones, or those of following it."""
        if is_batch_norm(layer) or is_known(layer):
            return self._known(layer, args, kwargs)
        states = bool(stateful_rnns(layer))
        if states and (self._inside or not self._parts):  # only a model itself has states split
            self.refuse("a state for each row")
        if states or is_declared(layer):
            self.note(id(layer), [], args, kwargs)
            operands = _operands((*args, *kwargs.values()))
            if {operand.each for operand in operands} - {None} != {1}:
                self.refuse(type(layer).__name__)
            return self._rows_like(self._spec(layer, args, kwargs), 1)
        return getattr(layer, call_name(layer))(*args, **kwargs)

    def _part(self, part: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before = self._failure
        self._inside, self._failure = True, None
        start = len(self._program)
        self._scratch.cut()
        try:
            for tensor in keras.tree.flatten((args, kwargs)):
                if keras.utils.is_keras_tensor(tensor) and each_of(tensor) not in (None, 1):
                    raise NotRowByRow("an input without rows")
            outputs = call(*args, **kwargs)
            self.check_outputs(outputs)
            self.programs[id(part)] = [
                *self.programs.get(id(part), []),
                self.program_since(start),
            ]
            return outputs
        except Exception as error:
            self.reasons.setdefault(id(part), self._failure or _in_words(error))
            # It will run on the whole batch. Its outputs are split into rows after that.
            return self._rows_like(self._spec(part, args, kwargs), 1)
        finally:
            self._inside, self._failure = False, before

    def _operate(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        name = type(op).__name__
        if not module_in_keras(type(op)) or name not in RULES:
            self.refuse(name)
        leaves = keras.tree.flatten((args, kwargs))
        attributes = [option for _, option in options_of(op)]
        counts = any(isinstance(x, RowCount) for x in (*leaves, *keras.tree.flatten(attributes)))
        if (counts or counts_in(args)) and name not in TAKE_COUNTS:
            self.refuse(COUNTS_ROWS)
        operands = _operands((*args, *kwargs.values()))
        if name != "Reshape":
            self.note(name, attributes, args, kwargs)
        if all(operand.each is None for operand in (*operands, *in_attributes(op))):
            if counts:
                self.refuse(COUNTS_ROWS)
            if name == "Reshape":
                self.note(name, attributes, args, kwargs)
            return self._rows_like(op.compute_output_spec(*args, **kwargs), None)
        each = RULES[name](op, operands, args + tuple(kwargs.values())) if operands else None
        if each is None:
            self.refuse(name)
        if name == "Reshape":
            shape = reshaped(op, operands[0])
            # The number of rows may be written as -1, as a count, or as a number.
            self.note(name, [each, (shape or ())[1:]], args[:1], {})
            first = operands[0].shape[0]
            if first is not None and shape is not None:
                shape = (first * (each or 1) // (operands[0].each or 1), *shape[1:])
            spec = keras.KerasTensor(shape, args[0].dtype)
        elif name in TAKE_COUNTS and counts | counts_in(args):
            spec = self._spec_of_all_rows(op, args)
        else:
            spec = op.compute_output_spec(*args, **kwargs)
        return self._rows_like(spec, each)

    def _spec_of_all_rows(self, op: Any, args: tuple[Any, ...]) -> Any:
        """Return the outputs of an operation that names all rows in a shape or slice."""
        if type(op).__name__ == "GetItem":
            key = args[1] if isinstance(args[1], tuple) else (args[1],)
            return op.compute_output_spec(args[0], (slice(None), *key[1:]))
        shape = tuple(op.shape)[1:]
        before = tuple(args[0].shape)[1:]
        sizes = [b if size == -1 else size for b, size in zip(before, shape, strict=True)]
        if any(size is not None and type(size) is not int for size in sizes):
            self.refuse(type(op).__name__)
        return keras.KerasTensor((self._first(op.shape[0].each), *sizes), args[0].dtype)

    def _first(self, each: int) -> int | None:
        """Return the static first dim of a tensor with so many entries for each row."""
        return None if self._rows is None else self._rows * each

    def _known(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of one of Keras's own layers, or of batch norm."""
        name = type(layer).__name__
        self.note(id(layer), [], args, kwargs)
        operands = _operands((*args, *kwargs.values()))
        each = {operand.each for operand in operands} - {None}
        inner = layers_in(layer)
        together = any(is_batch_norm(i) or i.activity_regularizer is not None for i in inner)
        draws = any(seed_generators(i) for i in inner)
        if True in [x for x in (*args, kwargs.get("training")) if isinstance(x, bool)]:
            for each_layer in inner:  # out of training, it draws nothing and takes no moments
                treated = is_batch_norm(each_layer) or seed_generators(each_layer)
                if treated and id(each_layer) not in self._held:
                    self.refuse(f"it calls {each_layer.name!r}, which the model does not hold")
        if not each and not together and not draws:
            return self._rows_like(self._spec(layer, args, kwargs), None)
        if any(x.each is None and not is_for_all_rows(layer, x.shape) for x in operands):
            self.refuse(name)
        inputs = [value for key, value in kwargs.items() if key not in MASKS_OF_ROWS]
        ranks = [x.rank for x in _operands((*args, *inputs)) if x.each is not None]
        if any(rank < least_rank(layer) for rank in ranks):
            self.refuse(name)  # another dim is the batch
        if len(each) != 1 or (together and each != {1}):
            self.refuse(name)
        if name in OF_ANY_RANK and len(operands) > 1 and aligned(operands) is None:
            self.refuse(name)
        return self._rows_like(self._spec(layer, args, kwargs), each.pop())

    def _spec(self, part: Any, args: Any, kwargs: Any) -> Any:
        """Return the shapes and dtypes of a call's outputs, by Keras's own inference."""
        HERE.follower = None
        try:
            if not isinstance(part, keras.layers.Layer):
                return part.compute_output_spec(*args, **kwargs)
            if module_in_keras(type(part)) or is_declared(part):
                outputs = part.compute_output_spec(*args, **kwargs)
                if not _has_unknown_dims(outputs):
                    return outputs
            return _spec_with_masks(part, args, kwargs)
        finally:
            HERE.follower = self

    def _rows_like(self, outputs: Any, each: int | None) -> Any:
        for leaf in keras.tree.flatten(outputs):
            for tensor in (leaf, get_keras_mask(leaf)):
                if keras.utils.is_keras_tensor(tensor):
                    follow(tensor)._lockstep_each = each
        return outputs

    def with_own_gradient(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the outputs of a function that `keras.ops.custom_gradient` wraps.

        Its gradient is followed too: it is given that of the rows of one replica.
        """
        outputs, gradient = function(*args, **kwargs)
        each = each_of(outputs)
        upstream = self._rows_like(keras.KerasTensor(outputs.shape, outputs.dtype), each)
        found = gradient(*args, upstream=upstream)
        found = found if isinstance(found, tuple) else (found,)
        for given, its in zip(args, found, strict=True):
            if its is not None and each_of(its) != each_of(given):
                self.refuse("a gradient of its own")
        return outputs

    # ------------------------------------------------------------------- calls without rows

    def shape(self, x: Any) -> tuple[Any, ...]:
        """Return the shape of a symbolic tensor, with the number of its rows."""
        each = each_of(x)
        shape = tuple(x.shape)
        return shape if each is None else (RowCount(each), *shape[1:])

    def made(self, shape: Any, dtype: Any) -> Any:
        """Return a tensor with equal or random entries for each row of the batch."""
        first, *rest = shape
        if not isinstance(first, RowCount) or any(type(dim) is not int for dim in rest):
            self.refuse(COUNTS_ROWS)
        self.note("made", [shape, dtype], (), {})
        dtype = keras.config.floatx() if dtype is None else dtype
        shape = (self._first(first.each), *rest)
        return self._rows_like(keras.KerasTensor(shape, dtype), first.each)

    def repeated(self, x: Any, shape: Any) -> Any:
        """Return a tensor of one row, repeated for each row of the batch."""
        before = shape_of(x)
        one = len(before) < len(shape) or (len(before) == len(shape) and before[0] == 1)
        if not is_tensor(x) or each_of(x) is not None or not one:
            self.refuse("the rows of one tensor repeated for all rows")
        self.note("repeated", [], (x,), {})
        return self.made(shape, keras.backend.standardize_dtype(x.dtype))

    def drawn(self, name: str, draw: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what a function of `keras.random` draws for each row of the batch."""
        given = dict(zip(_RANDOM[name], args, strict=False)) | kwargs
        seed = given.get("seed")
        tensors = [v for k, v in given.items() if k not in ("shape", "inputs") and shape_of(v)]
        if not (seed is None or isinstance(seed, keras.random.SeedGenerator)) or tensors:
            self.refuse("random numbers that replicas would share")
        if seed is not None and id(seed) not in self._held:
            self.refuse("it draws from a seed generator that the model does not hold")
        self.draws_without_seed |= seed is None
        if name == "dropout":
            x = given["inputs"]
            if each_of(x) is None or given.get("noise_shape") is not None:
                self.refuse("random numbers for all rows together")
            self.note(name, [id(seed), given["rate"]], (x,), {})
            return self._rows_like(keras.KerasTensor(x.shape, x.dtype), each_of(x))
        if not counts_in((given["shape"],)):
            self.refuse("random numbers for all rows together")
        integer = "int32" if name == "randint" else None
        self.note(name, [id(seed), *map(repr, given.values())], (), {})
        return self.made(given["shape"], given.get("dtype") or integer)

    # ------------------------------------------------------------------- inside

    def fail(self, reason: str) -> None:
        """Refuse the layer that is followed when its call has returned."""
        self._failure = self._failure or reason

    def refuse(self, reason: str) -> None:
        metric = _updated_metric() if self._held else None
        reason = reason if metric is None else f"{UPDATES_METRIC} {metric.name!r}"
        self.fail(reason)
        raise NotRowByRow(reason)

    def note(self, name: Any, attributes: list[Any], args: Any, kwargs: Any) -> None:
        leaves = keras.tree.flatten([attributes, list(args), sorted(kwargs.items())])
        self._program.append((name, [self._description(leaf) for leaf in leaves]))

    def _description(self, leaf: Any) -> Any:
        self._kept.append(leaf)
        if keras.utils.is_keras_tensor(leaf):
            if not hasattr(leaf, "_lockstep_each"):
                self.refuse("a symbolic tensor of another call")
            return "tensor", self._numbers.setdefault(id(leaf), len(self._numbers))
        if isinstance(leaf, keras.Variable):
            return "variable", id(leaf)
        if isinstance(leaf, np.ndarray | np.generic):
            return str(leaf.dtype), leaf.shape, leaf.tobytes()
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            try:
                return self._scratch.describe(leaf)
            except NotRowByRow as error:
                self.refuse(str(error))
        plain = leaf is None or isinstance(leaf, bool | int | float | complex | str | slice)
        return repr(leaf) if plain or isinstance(leaf, RowCount) else type(leaf).__name__


def _operands(values: tuple[Any, ...]) -> list[Operand]:
    return operands_in(values, each_of)


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


def _has_unknown_dims(tree: Any) -> bool:
    return any(None in shape_of(leaf)[1:] for leaf in keras.tree.flatten(tree))


def _spec_with_masks(layer: Any, args: Any, kwargs: Any) -> Any:
    """Return the shapes and dtypes of a layer's outputs, with those of their masks."""
    inputs = [leaf for leaf in keras.tree.flatten((args, kwargs)) if is_tensor(leaf)]
    # On JAX, Keras takes no `None` in a list.
    masks = {str(n): get_keras_mask(leaf) for n, leaf in enumerate(inputs)}
    masks = {n: mask for n, mask in masks.items() if mask is not None}
    has_mask: list[bool] = []

    def call(args: Any, kwargs: Any, masks: Any) -> Any:
        leaves = [leaf for leaf in keras.tree.flatten((args, kwargs)) if is_tensor(leaf)]
        for n, mask in masks.items():
            set_keras_mask(leaves[int(n)], mask)
        outputs = layer(*args, **kwargs)
        found = [get_keras_mask(leaf) for leaf in keras.tree.flatten(outputs)]
        has_mask[:] = [mask is not None for mask in found]
        # On PyTorch, Keras takes tensors alone.
        return outputs, [mask for mask in found if mask is not None]

    outputs, made = compute_output_spec(call, args, kwargs, masks)
    leaves = keras.tree.flatten(outputs)
    masked = [leaf for leaf, has in zip(leaves, has_mask, strict=True) if has]
    for leaf, mask in zip(masked, made, strict=True):
        set_keras_mask(leaf, mask)
    return outputs


UPDATES_METRIC = "its call updates the metric"


def _updated_metric() -> Any:
    """Return the metric whose update calls this, `None` if none does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "update_state" else None
        if isinstance(owner, keras.metrics.Metric):
            return owner
        frame = frame.f_back
    return None


def _in_words(error: Exception) -> str:
    if isinstance(error, NotRowByRow):
        # keras/src/utils/traceback_utils.py, inject_argument_info_in_traceback, wraps the
        # message of an error from a layer's call in bold, once for each enclosing layer.
        return str(error).split("\x1b[1m")[-1].split("\x1b[0m")[0]
    if "KerasTensor" in str(error):  # keras/src/backend/common/keras_tensor.py
        return "it calls more than Keras's layers and keras.ops"
    return f"its code ends in {type(error).__name__} where tensors have a shape and no value"


def _follower() -> _Follower | None:
    follower: _Follower | None = getattr(HERE, "follower", None)
    return follower


def is_following() -> bool:
    """Return whether code of a layer is followed in this thread, and no shapes are inferred."""
    return _follower() is not None


_RANDOM = {
    "dropout": ("inputs", "rate", "noise_shape", "seed"),
    "normal": ("shape", "mean", "stddev", "dtype", "seed"),
    "randint": ("shape", "minval", "maxval", "dtype", "seed"),
    "truncated_normal": ("shape", "mean", "stddev", "dtype", "seed"),
    "uniform": ("shape", "minval", "maxval", "dtype", "seed"),
}
"""Functions of `keras.random` that draw for each entry alone, with their parameters."""


class _Hooks:
    """What Keras's functions do while a follower is active in this thread."""

    random = tuple(_RANDOM)

    @staticmethod
    def operation(plain: Any) -> Any:
        @functools.wraps(plain)
        def symbolic_call(op: Any, *args: Any, **kwargs: Any) -> Any:
            follower = _follower()
            if follower is None:
                return plain(op, *args, **kwargs)
            return follower.operate(op, args, kwargs)

        return symbolic_call

    @staticmethod
    def layer(plain: Any) -> Any:
        @functools.wraps(plain)
        def symbolic_call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            follower = _follower()
            if follower is None:
                return plain(layer, *args, **kwargs)
            return follower.inside_layer(layer, args, kwargs)

        return symbolic_call

    @staticmethod
    def layer_call(plain: Any) -> Any:
        @functools.wraps(plain)
        def __call__(layer: Any, *args: Any, **kwargs: Any) -> Any:
            follower = _follower()
            if follower is None:
                return plain(layer, *args, **kwargs)
            return follower.call_layer(layer, plain, args, kwargs)

        return __call__

    @staticmethod
    def node(plain: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            return None if _follower() is not None else plain(*args, **kwargs)

        return make

    @staticmethod
    def next_seed(plain: Any) -> Any:
        @functools.wraps(plain)
        def next(generator: Any, *args: Any, **kwargs: Any) -> Any:
            follower = _follower()
            if follower is not None:
                follower.refuse("random numbers for all rows together")
            return plain(generator, *args, **kwargs)

        return next

    @staticmethod
    def custom_gradient(plain: Any) -> Any:
        @functools.wraps(plain)
        def __call__(wrapped: Any, *args: Any, **kwargs: Any) -> Any:
            follower = _follower()
            if follower is None:
                return plain(wrapped, *args, **kwargs)
            return follower.with_own_gradient(wrapped.forward_fn, args, kwargs)

        return __call__

    @staticmethod
    def shape(plain: Any) -> Any:
        @functools.wraps(plain)
        def shape(x: Any) -> Any:
            follower = _follower()
            symbolic = follower is not None and keras.utils.is_keras_tensor(x)
            return follower.shape(x) if follower and symbolic else plain(x)

        return shape

    @staticmethod
    def filled(plain: Any) -> Any:
        @functools.wraps(plain)
        def fill(shape: Any, *args: Any, **kwargs: Any) -> Any:
            follower = _follower()
            if follower is None or not counts_in((shape,)):
                return plain(shape, *args, **kwargs)
            given = dict(zip(("dtype",), args, strict=False)) | kwargs
            return follower.made(shape, given.get("dtype"))

        return fill

    @staticmethod
    def full(plain: Any) -> Any:
        @functools.wraps(plain)
        def full(shape: Any, fill_value: Any, dtype: Any = None) -> Any:
            follower = _follower()
            if follower is None or not counts_in((shape,)):
                return plain(shape, fill_value, dtype)
            if not isinstance(fill_value, bool | int | float):
                follower.refuse("Full")
            return follower.made(shape, dtype or keras.backend.result_type(type(fill_value)))

        return full

    @staticmethod
    def broadcast_to(plain: Any) -> Any:
        @functools.wraps(plain)
        def broadcast_to(x: Any, shape: Any) -> Any:
            follower = _follower()
            if follower is None or not counts_in((shape,)) or keras.utils.is_keras_tensor(x):
                return plain(x, shape)
            return follower.repeated(x, shape)

        return broadcast_to

    @staticmethod
    def tile(plain: Any) -> Any:
        @functools.wraps(plain)
        def tile(x: Any, repeats: Any) -> Any:
            follower = _follower()
            if follower is None or not counts_in((repeats,)):
                return plain(x, repeats)
            if len(repeats) != len(shape_of(x)) or any(r != 1 for r in repeats[1:]):
                follower.refuse("Tile")
            return follower.repeated(x, (repeats[0], *shape_of(x)[1:]))

        return tile

    @staticmethod
    def repeat(plain: Any) -> Any:
        @functools.wraps(plain)
        def repeat(x: Any, repeats: Any, axis: Any = None) -> Any:
            follower = _follower()
            if follower is None or not isinstance(repeats, RowCount):
                return plain(x, repeats, axis)
            if axis != 0:
                follower.refuse("Repeat")
            return follower.repeated(x, (repeats, *shape_of(x)[1:]))

        return repeat

    @staticmethod
    def drawn(name: str, plain: Any) -> Any:
        @functools.wraps(plain)
        def draw(*args: Any, **kwargs: Any) -> Any:
            follower = _follower()
            if follower is None:
                return plain(*args, **kwargs)
            return follower.drawn(name, plain, args, kwargs)

        return draw
