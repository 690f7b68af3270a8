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
    spec_with_masks,
    stateful_rnns,
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
    has_unknown_dims,
    in_attributes,
    in_words,
    is_tensor,
    operands_in,
    options_of,
    reshaped,
    shape_of,
)
from lockstep.keras_compat import (
    get_keras_mask,
    layers_in,
    module_in_keras,
    seed_generators,
    symbolic_calls,
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


_CONSTANTS = (bool, int, float, str, type(None))


class Follower:
    """Follows the rows of symbolic tensors through the calls of one run.

    Attributes:
        reasons: Why a part is refused, by its identity.
        programs: What each part calls, by its identity.
        draws_without_seed: Whether code draws from Keras's global seed generator.
        draws_together: Whether each row has the random numbers of one device.
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
        self.draws_without_seed = self.draws_together = False
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
                    raise NotRowByRow("an output that is not a tensor")
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
            self.reasons.setdefault(id(part), self._failure or in_words(error))
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
                    self.refuse(f"it calls {each_layer.name!r}, which is not part of the model")
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
                if not has_unknown_dims(outputs):
                    return outputs
            return spec_with_masks(part, args, kwargs)
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
                self.refuse("a custom gradient")
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
            self.refuse("one row repeated for all rows")
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
            self.refuse("it draws from a seed generator that is not part of the model")
        self.draws_without_seed |= seed is None
        if seed is None and self.draws_together:
            self.refuse("random numbers for all rows, drawn without a seed")
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
        """Refuse the layer that is followed, at once."""
        metric = _updated_metric() if self._held else None
        reason = reason if metric is None else f"{UPDATES_METRIC} {metric.name!r}"
        self.fail(reason)
        raise NotRowByRow(reason)

    def note(self, name: Any, attributes: list[Any], args: Any, kwargs: Any) -> None:
        """Note a call in the program."""
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


def _follower() -> Follower | None:
    follower: Follower | None = getattr(HERE, "follower", None)
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
