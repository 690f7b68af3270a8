"""Decides whether layers, losses and metrics work row by row on a batch.

An engine with a copy of the model on each device splits a layer only if each row of its
outputs depends on the same row of its inputs alone. Keras's own layers are known. A user's
layer is followed: its `call` runs on symbolic tensors, and each of them carries how its first
dim relates to the rows of the batch. Every operation of `keras.ops` has a rule, and code
without a rule is refused. The caller then runs such a layer on the whole batch.

The rules work on what Keras calls, not on what a backend executes. So they serve all
backends, and an operation has one rule even if a backend computes it in many steps.
"""

import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import keras
import numpy as np

from lockstep.engines.followed_tensors import HERE, asked_by_user, follow, refuse
from lockstep.engines.patched import patched
from lockstep.keras_compat import (
    GLOBAL_SEED_GENERATOR,
    Functional,
    calls_of,
    clear_losses,
    compute_output_spec,
    get_keras_mask,
    global_seed_generator,
    global_state,
    is_code_of_keras,
    layers_in,
    layers_of,
    module_in_keras,
    operations_of,
    reduction_axes,
    runs_code_of_keras,
    seed_generators,
    set_keras_mask,
    symbolic_calls,
    takes_training,
)

Reasons = dict[int, str]
"""Why each refused part is refused, by the identity of the part."""


class NotRowByRow(Exception):
    """Code that is not known to work row by row; the message is the reason."""


# ------------------------------------------------------------------------- layers of Keras

_LAYERS = """
    Activation ActivityRegularization AdaptiveAveragePooling1D AdaptiveAveragePooling2D
    AdaptiveAveragePooling3D AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D Add
    AdditiveAttention AlphaDropout Attention Average AveragePooling1D AveragePooling2D
    AveragePooling3D Bidirectional CategoryEncoding CenterCrop Concatenate Conv1D
    Conv1DTranspose Conv2D Conv2DTranspose Conv3D Conv3DTranspose ConvLSTM1D ConvLSTM2D
    ConvLSTM3D ConvLSTMCell Cropping1D Cropping2D Cropping3D Dense DepthwiseConv1D
    DepthwiseConv2D Discretization Dot Dropout ELU EinsumDense Embedding Flatten GRU GRUCell
    GaussianDropout GaussianNoise GlobalAveragePooling1D GlobalAveragePooling2D
    GlobalAveragePooling3D GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D
    GroupNormalization GroupedQueryAttention Hashing Identity InputLayer IntegerLookup LSTM
    LSTMCell LayerNormalization LeakyReLU Masking MaxPooling1D MaxPooling2D MaxPooling3D Maximum
    Minimum MultiHeadAttention Multiply Normalization PReLU Permute RMSNormalization RNN
    RandomBrightness RandomContrast RandomFlip RandomRotation RandomTranslation RandomZoom ReLU
    RepeatVector Rescaling Reshape Resizing ReversibleEmbedding SeparableConv1D SeparableConv2D
    SimpleRNN SimpleRNNCell Softmax SpatialDropout1D SpatialDropout2D SpatialDropout3D
    SpectralNormalization StackedRNNCells StringLookup Subtract TextVectorization
    TimeDistributed UnitNormalization UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D
    ZeroPadding2D ZeroPadding3D
"""
LAYERS_BY_ROWS = frozenset(_LAYERS.split())
"""Keras layers in which a row of the output depends on the same row of the input alone."""

_ANY_RANK = """
    Add Average Dropout Embedding Flatten Identity InputLayer Maximum Minimum Multiply Rescaling
    ReversibleEmbedding Subtract
"""
OF_ANY_RANK = frozenset(_ANY_RANK.split())
"""Those that take a batch of scalars. The others may take the last dim, the batch, for another."""

_MASKED_ATTENTION = ("MultiHeadAttention", "GroupedQueryAttention")


def is_container(layer: Any) -> bool:
    """Return whether a layer only calls its inner layers, as a graph or a sequence."""
    # keras/src/models/functional.py and sequential.py
    containers = (Functional.call, keras.Sequential.call)
    by_keras = type(layer).call in containers and is_code_of_keras(type(layer).call)
    return by_keras and _is_called_as_its_class(layer)


def is_batch_norm(layer: Any) -> bool:
    """Return whether a layer is Keras's own batch norm over the rows."""
    return (
        type(layer) is keras.layers.BatchNormalization
        and layer.built
        and 0 in reduction_axes(layer)
        and runs_code_of_keras(layer)
    )


def works_by_rows(layer: Any) -> bool:
    """Return whether one of Keras's own layers works row by row, wherever it is called.

    The calls that Keras has recorded of the layer count, as its options do.
    """
    if not isinstance(layer, keras.layers.Layer) or not _is_known(layer):
        return False
    nodes = calls_of(layer)
    arrays = [array for node in nodes for array in arrays_in(node)]
    if not all(_is_for_all_rows(layer, tuple(array.shape)) for array in arrays):
        return False
    ranks = [len(tensor.shape) for node in nodes for tensor in node.input_tensors]
    return type(layer).__name__ in OF_ANY_RANK or all(rank > 1 for rank in ranks)


def stateful_rnns(layer: Any) -> list[Any]:
    """Return the stateful RNNs of an RNN layer or of a `Bidirectional` one.

    Each row of their state belongs to one row of the batch. The list is empty for other
    layers, and if anything else prevents the layer from working row by row.
    """
    wraps = type(layer) is keras.layers.Bidirectional
    rnns = [layer.forward_layer, layer.backward_layer] if wraps else [layer]
    stateful = [rnn for rnn in rnns if isinstance(rnn, keras.layers.RNN) and rnn.stateful]
    if len(stateful) < len(rnns) or getattr(layer, "activity_regularizer", None) is not None:
        return []
    with patched([(each, "stateful", False) for each in {layer, *rnns}]):
        return stateful if works_by_rows(layer) else []


def drawing_layers(part: Any) -> list[Any]:
    """Return the layers inside `part` that draw random numbers and can run on a global batch."""
    if not isinstance(part, keras.layers.Layer):
        return []
    if seed_generators(part) or works_by_rows(part) or stateful_rnns(part):
        return [part] if any(seed_generators(layer) for layer in layers_in(part)) else []
    return [layer for inner in layers_of(part) for layer in drawing_layers(inner)]


def _is_known(layer: Any) -> bool:
    """Return whether the table has this layer, with options that leave the rows alone."""
    if not module_in_keras(type(layer)) or type(layer).__name__ not in LAYERS_BY_ROWS:
        return False
    if not _is_called_as_its_class(layer) or not runs_code_of_keras(layer):
        return False
    if is_in_float8(layer) or not _has_plain_options(layer):
        return False
    return all(_fits_inside(part) for part in layers_of(layer))


def _is_for_all_rows(layer: Any, shape: tuple[int | None, ...]) -> bool:
    """Return whether an input of this shape is shared by all rows of the batch."""
    # The mask of an attention layer may have no dim for the rows.
    is_mask = type(layer).__name__ in _MASKED_ATTENTION and len(shape) == 2
    return is_mask or shape[:1] in ((), (1,))


def _is_called_as_its_class(layer: Any) -> bool:
    return bool(module_in_keras(type(layer).__call__)) and "call" not in vars(layer)


def call_name(layer: Any) -> str:
    """Return the name of the method that a call of a layer or operation runs."""
    # keras/src/ops/operation.py, Operation.__call__
    return "call" if getattr(layer, "quantization_mode", None) is None else "quantized_call"


def is_in_float8(layer: Any) -> bool:
    """Return whether a layer scales by the largest values of the whole batch and its gradient."""
    return getattr(layer, "quantization_mode", None) == "float8"


def arrays_in(node: Any) -> list[Any]:
    """Return the arrays among the arguments of a call in a functional model."""
    # keras/src/ops/node.py, Node.arguments
    leaves = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
    return [leaf for leaf in leaves if not keras.utils.is_keras_tensor(leaf) and _shape_of(leaf)]


def _fits_inside(part: Any) -> bool:
    # A part of a wrapper or cell may run inside a loop, where replicas cannot synchronize.
    if is_container(part):
        inside = all(_fits_inside(inner) for inner in operations_of(part))
    else:
        inside = works_by_rows(part)
    return inside and getattr(part, "activity_regularizer", None) is None


def _has_plain_options(layer: Any) -> bool:
    options, name = vars(layer), type(layer).__name__
    if name == "Normalization":  # its other axes are those of the data that it adapted to
        return _leaves_rows(layer.axis)
    for option, value in options.items():
        if option.endswith("activation") and callable(value) and not _activates_by_rows(value):
            return False
        if option == "axis" and value is None:
            return False
        if option.lstrip("_").rpartition("_")[2] in ("axis", "axes") and not _leaves_rows(value):
            return False
    if options.get("noise_shape") is not None or options.get("stateful"):
        return False
    if options.get("sparse"):
        return False
    if name == "TextVectorization":
        options = layer.get_config()
        if not all(isinstance(options[part], str | None) for part in ("standardize", "split")):
            return False  # a function of the user's
        # Otherwise, rows have the length of the longest one of the batch.
        return options["output_mode"] != "int" or options["output_sequence_length"] is not None
    return name != "EinsumDense" or _keeps_first(layer.equation)


def _leaves_rows(axes: Any) -> bool:
    flat = [axis for axis in keras.tree.flatten(axes) if isinstance(axis, int)]
    return all(axis == -1 or axis > 0 for axis in flat)


def _keeps_first(equation: str) -> bool:
    inputs, _, outputs = equation.replace(" ", "").partition("->")
    return (inputs[:1] == outputs[:1] and inputs.partition(",")[2].find(inputs[:1]) < 0) or (
        inputs.startswith("...") and outputs.startswith("...")
    )


def _activates_by_rows(activation: Any) -> bool:
    if isinstance(activation, keras.layers.Layer):
        return works_by_rows(activation)
    name = str(getattr(activation, "__name__", "")).title().replace("_", "")
    module = module_in_keras(activation)
    return module.startswith("activations.") or (module.startswith("ops.") and name in ELEMENTWISE)


# ------------------------------------------------------------------------- rules of keras.ops


class RowCount:
    """The number of rows in the batch, times `each`, in a call that is followed.

    It can be multiplied, divided and put into shapes. Any other use depends on the number
    of rows, and fails.
    """

    def __init__(self, each: int = 1) -> None:
        self.each = each

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of a number of rows in a real call, for the user's code."""
        return HERE.follower.count_kind if asked_by_user(2) else RowCount

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and asked_by_user(2):
            refuse(_NUMBER)
        raise AttributeError(name)

    def __mul__(self, other: Any) -> "RowCount":
        if type(other) is not int or other < 1:
            refuse(_NUMBER)
        return RowCount(self.each * other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> "RowCount":
        if type(other) is not int or other < 1 or self.each % other:
            refuse(_NUMBER)
        return RowCount(self.each // other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowCount) or other.each != self.each:
            refuse(_NUMBER)
        return True

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RowCount({self.each})"

    def _refuse(self, *args: Any) -> Any:
        refuse(_NUMBER)

    __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __rfloordiv__ = _refuse
    __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __int__ = __float__ = __index__ = __bool__ = __array__ = __tf_tensor__ = _refuse


_NUMBER = "it computes with the number of rows"


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation takes.

    Attributes:
        shape: Its shape; `None` for unknown dims.
        each: The number of consecutive entries of the first dim for one row of the batch.
            Each of them depends on that row alone. `None` if the tensor is the same for
            every batch.
    """

    shape: tuple[int | None, ...]
    each: int | None

    @property
    def rank(self) -> int:
        """The number of dims."""
        return len(self.shape)


Rule = Callable[[Any, list[Operand], tuple[Any, ...]], int | None]
"""Returns `Operand.each` of the outputs, or `None` if the rows are not known to be apart.

It takes the operation, its operands, at least one of which has rows, and its arguments.
"""


def _only(operands: list[Operand], least: int = 1) -> Operand | None:
    """Return the first operand, if it has rows and this rank, and if no other one has rows."""
    first, *others = operands
    alone = first.each is not None and all(operand.each is None for operand in others)
    return first if alone and first.rank >= least else None


def _each(operand: Operand | None) -> int | None:
    return None if operand is None else operand.each


def _aligned(operands: list[Operand]) -> int | None:
    """Return the rows of a broadcast result, `None` if the rows are not aligned.

    Operands with rows must have the full rank. The others must have a lower rank, or a first
    dim of 1.
    """
    rank = max(operand.rank for operand in operands)
    with_rows = [operand for operand in operands if operand.each is not None]
    if len({operand.each for operand in with_rows}) != 1 or rank < 1:
        return None
    for operand in operands:
        if operand.each is None:
            fits = operand.rank < rank or operand.shape[0] == 1
        else:
            fits = operand.rank == rank
        if not fits:
            return None
    return with_rows[0].each


def _elementwise(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    if any(isinstance(option, list | tuple) for name, option in _options(op)):
        return None  # numbers of an unknown shape
    return _aligned([*operands, *_in_attributes(op)])


def _along_axes(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    operand = _only(operands)
    axes = getattr(op, "axis", getattr(op, "axes", None))
    if operand is None or len(operands) > 1 or axes is None or _in_attributes(op):
        return None
    return operand.each if _apart_from_rows(axes, operand.rank) else None


def _apart_from_rows(axes: Any, rank: int) -> bool:
    """Return whether these axes of a tensor are known and do not include the first one."""
    flat = keras.tree.flatten(axes)
    known = all(isinstance(axis, int) and -rank <= axis < rank for axis in flat)
    return known and bool(flat) and all(axis % rank != 0 for axis in flat)


def _with_rank(least: int) -> Rule:
    def rule(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
        return None if _in_attributes(op) else _each(_only(operands, least))

    return rule


def _with_scalars(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    """The first operand is normalized along axes other than the rows, by weights of features."""
    operand = _only(operands, 2)
    axes = getattr(op, "axis", None)
    if operand is None or axes is None or not _apart_from_rows(axes, operand.rank):
        return None
    return operand.each if all(other.rank <= 1 for other in operands[1:]) else None


def _expand_dims(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    operand = _only(operands)
    added = len(keras.tree.flatten(op.axis))
    fits = operand is not None and _apart_from_rows(op.axis, operand.rank + added)
    return _each(operand) if fits else None


def _transpose(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    return _each(_only(operands)) if op.axes is not None and op.axes[0] == 0 else None


def _swap(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    operand = _only(operands)
    names = ("axis1", "axis2", "source", "destination")
    axes = [getattr(op, name) for name in names if hasattr(op, name)]
    fits = operand is not None and _apart_from_rows(axes, operand.rank)
    return _each(operand) if fits else None


def _join(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    rank = operands[0].rank + (type(op).__name__ == "Stack")
    if len({(operand.each, operand.rank) for operand in operands}) != 1:
        return None
    return operands[0].each if _apart_from_rows(op.axis, rank) else None


def _take(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    if len(operands) != 2:
        operand = _only(operands)
        if operand is None or not isinstance(args[-1], int) or op.axis is None:
            return None
        return operand.each if _apart_from_rows(op.axis, operand.rank) else None
    table, indices = operands
    if table.each is None:
        first = op.axis is None or (table.rank > 0 and op.axis % table.rank == 0)
        return indices.each if first and indices.rank > 0 else None
    fits = indices.each is None and op.axis is not None and _apart_from_rows(op.axis, table.rank)
    return table.each if fits else None


def _take_along(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    if len(operands) != 2 or len({(operand.each, operand.rank) for operand in operands}) != 1:
        return None
    fits = op.axis is not None and _apart_from_rows(op.axis, operands[0].rank)
    return operands[0].each if fits else None


def _get_item(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    key = args[1] if isinstance(args[1], tuple) else (args[1],)
    operand = operands[0]
    for part in key:
        plain = part is None or part is Ellipsis or type(part) is int or isinstance(part, slice)
        if not plain or operand.each is None:
            return None
    named = sum(part is not None and part is not Ellipsis for part in key)
    if key and key[0] is Ellipsis:
        return operand.each if named < operand.rank else None
    if not key or not isinstance(key[0], slice):
        return None
    first = key[0]
    whole = first.stop is None or _is_count(first.stop, operand.each)
    return operand.each if first.start in (None, 0) and whole and first.step is None else None


def _is_count(number: Any, each: int | None) -> bool:
    return isinstance(number, RowCount) and number.each == each


def _slice(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    starts = args[1]
    plain = isinstance(starts, list | tuple) and len(starts) > 0 and type(starts[0]) is int
    operand = operands[0]
    others = all(other.each is None for other in operands[1:])
    return operand.each if plain and starts[0] == 0 and others and _starts(op, operand) else None


def _starts(op: Any, operand: Operand) -> bool:
    """Return whether the shape in an attribute starts with all rows of an operand."""
    return len(op.shape) > 0 and _is_count(op.shape[0], operand.each)


def _reshape(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    shape = _reshaped(op, operands[0])
    if shape is None or None in operands[0].shape[1:]:
        return None
    # A reshape keeps the order of values. So a row of the batch stays one block, and the
    # sizes of a block and of an entry tell how many entries it has.
    block = (operands[0].each or 1) * math.prod(_known(operands[0].shape[1:]))
    entry = math.prod(_known(shape[1:]))
    if not entry or not block or block % entry:
        return None
    each = block // entry
    wanted = _as_count(op.newshape, operands[0])[0]
    return each if type(wanted) is int or _is_count(wanted, each) else None


def _as_count(newshape: Any, operand: Operand) -> tuple[Any, ...]:
    """Return a wanted shape, whose first dim may be the static number of rows."""
    first, *rest = newshape if isinstance(newshape, list | tuple) else (newshape,)
    size = operand.shape[0]
    if type(first) is int and first > 0 and size is not None and operand.each is not None:
        rows = size // operand.each
        first = first if first % rows else RowCount(first // rows)
    return first, *rest


def _reshaped(op: Any, operand: Operand) -> tuple[int | None, ...] | None:
    """Return the shape of a reshaped tensor of rows, `None` if it is not known."""
    if isinstance(op.newshape, list | tuple) and not op.newshape:
        return None
    first, *rest = _as_count(op.newshape, operand)
    if not (type(first) is int or isinstance(first, RowCount)):
        return None
    if any(type(dim) is not int for dim in rest) or (type(first) is int and first != -1):
        return None
    if -1 in rest and isinstance(first, RowCount) and None not in operand.shape[1:]:
        others = math.prod(dim for dim in rest if dim != -1)
        size = (operand.each or 1) * math.prod(_known(operand.shape[1:])) // first.each
        if rest.count(-1) > 1 or not others or size % others:
            return None
        rest = [size // others if dim == -1 else dim for dim in rest]
    return None if -1 in rest else (None, *rest)


def _known(shape: tuple[int | None, ...]) -> list[int]:
    return [dim for dim in shape if dim is not None]


def _broadcast(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    operand = _only(operands)
    fits = operand is not None and len(op.shape) == operand.rank and _starts(op, operand)
    return _each(operand) if fits else None


def _tile(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    operand = _only(operands)
    repeats = op.repeats if isinstance(op.repeats, list | tuple) else (op.repeats,)
    if operand is None or any(type(number) is not int for number in repeats):
        return None
    times = [1] * (operand.rank - len(repeats)) + list(repeats)
    return operand.each if len(times) == operand.rank and times[0] == 1 else None


def _pad(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    operand = _only(operands)
    widths = [tuple(width) for width in op.pad_width]
    fits = operand is not None and len(widths) == operand.rank and widths[0] == (0, 0)
    return _each(operand) if fits else None


def _matmul(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    one, other = operands
    if one.each is not None and other.each is not None:
        return one.each if one.each == other.each and one.rank == other.rank >= 3 else None
    if one.each is not None:
        lower = other.rank <= 2 or other.rank < one.rank
        same = other.rank == one.rank and other.rank >= 3 and other.shape[0] == 1
        return one.each if one.rank >= 2 and (lower or same) else None
    fits = other.rank >= 3 and (
        one.rank < other.rank or (one.rank == other.rank and one.shape[0] == 1)
    )
    return other.each if fits else None


def _dot(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    operand = _only(operands, 2)
    return _each(operand) if len(operands) == 2 and operands[1].rank in (1, 2) else None


def _tensordot(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    operand = _only(operands)
    if operand is None or len(operands) != 2:
        return None
    if type(op.axes) is int:
        return operand.each if 0 <= op.axes < operand.rank else None
    return operand.each if _apart_from_rows(op.axes[0], operand.rank) else None


def _einsum(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    inputs, _, output = op.subscripts.replace(" ", "").partition("->")
    labels_of = inputs.split(",")
    batch = output[:1]
    if not batch or len(labels_of) != len(operands):
        return None
    spread = set()
    for labels, operand in zip(labels_of, operands, strict=True):
        if operand.each is not None:
            if labels[:1] != batch or labels.count(batch) != (3 if batch == "." else 1):
                return None
            spread.add(operand.rank - len(labels.replace("...", "")))
        elif batch in labels:
            return None
    if len({operand.each for operand in operands} - {None}) != 1:
        return None
    if batch == "." and (len(spread) != 1 or min(spread) < 1):
        return None
    return next(operand.each for operand in operands if operand.each is not None)


def _where(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    return _aligned(operands) if len(args) == 3 and args[1] is not None else None


def _all_rows(least: int, rank: int | None = None) -> Rule:
    """All operands have the same rows; the last one has at least this rank."""

    def rule(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
        same = len({operand.each for operand in operands}) == 1
        fits = operands[-1].rank >= least and (rank is None or operands[-1].rank == rank)
        axis = getattr(op, "axis", -1)
        along = axis == -1 or (type(axis) is int and axis > 0)
        return operands[0].each if same and fits and along else None

    return rule


def _attention(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    each = operands[0].each
    for number, operand in enumerate(operands):
        shared = number > 2 and operand.each is None and operand.shape[:1] == (1,)
        if operand.rank != 4 or not (shared or (each is not None and operand.each == each)):
            return None
    return each


def _one_hot(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    operand = _only(operands)
    fits = operand is not None and _apart_from_rows(op.axis, operand.rank + 1)
    return _each(operand) if fits else None


def _options(op: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an operation that its caller chose."""
    return [(k, v) for k, v in vars(op).items() if not k.startswith("_") and k != "name"]


def _in_attributes(op: Any) -> list[Operand]:
    """Return the tensors that an operation keeps in its attributes."""
    leaves = keras.tree.flatten([option for _, option in _options(op)])
    return [Operand(_shape_of(leaf), _each_of(leaf)) for leaf in leaves if _shape_of(leaf)]


_ELEMENTWISE = """
    Abs Absolute Add Angle Arccos Arccosh Arcsin Arcsinh Arctan Arctan2 Arctanh BinaryCrossentropy
    BitwiseAnd BitwiseInvert BitwiseLeftShift BitwiseNot BitwiseOr BitwiseRightShift BitwiseXor
    Cast Cbrt Ceil Celu Clip Conj Conjugate ConvertToTensor Copy Cos Cosh Deg2rad Divide
    DivideNoNan Elu Equal Erf Erfc Erfinv Exp Exp2 Expm1 Fabs Floor FloorDivide Fmax Fmin Fmod
    FullLike Gelu Greater GreaterEqual HardShrink HardSigmoid HardSilu HardTanh Heaviside Hypot
    Imag Isclose Isfinite Isinf Isnan Isneginf Isposinf Isreal LeakyRelu LeftShift Less LessEqual
    Log Log10 Log1p Log2 LogSigmoid Logaddexp Logaddexp2 LogicalAnd LogicalNot LogicalOr
    LogicalXor Maximum Minimum Mod Multiply NanToNum Negative NotEqual OnesLike Polar Power
    Rad2deg Real Reciprocal Relu Relu6 RightShift Round Rsqrt SaturateCast Selu Sigmoid Sign
    Signbit Silu Sin Sinc Sinh SoftShrink Softplus Softsign SparsePlus SparseSigmoid Sqrt Square
    Squareplus StopGradient Subtract Tan Tanh TanhShrink Threshold TrueDivide Trunc ZerosLike
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
_ALONG_AXES = """
    All Amax Amin Any Argmax Argmin Argsort Average CountNonzero Cumprod Cumsum Flip Glu
    LogSoftmax Logsumexp Max Mean Median Min Moments Nanargmax Nanargmin Nancumprod Nancumsum
    Nanmax Nanmean Nanmin Nanprod Nanstd Nansum Nanvar Norm Normalize Prod Ptp Repeat Roll
    Softmax Sort Sparsemax Split Squeeze Std Sum Unstack Var
"""
_IMAGES = "CropImages ExtractPatches HSVToRGB PadImages RGBToGrayscale RGBToHSV Resize"
_FILTERS = """
    AdaptiveAveragePool AdaptiveMaxPool AveragePool Conv ConvTranspose DepthwiseConv MaxPool
    SeparableConv
"""

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(_ALONG_AXES.split(), _along_axes),
    **dict.fromkeys(_IMAGES.split(), _with_rank(4)),
    **dict.fromkeys(_FILTERS.split(), _with_rank(3)),
    **dict.fromkeys(("BatchNorm", "LayerNorm", "RMSNorm"), _with_scalars),
    **dict.fromkeys(("Cholesky", "Det", "Inv", "Tril", "Triu"), _with_rank(3)),
    **dict.fromkeys(("Concatenate", "Stack"), _join),
    **dict.fromkeys(("Moveaxis", "Swapaxes"), _swap),
    "BroadcastTo": _broadcast,
    "CategoricalCrossentropy": _all_rows(2),
    "Dot": _dot,
    "DotProductAttention": _attention,
    "Einsum": _einsum,
    "ExpandDims": _expand_dims,
    "GetItem": _get_item,
    "InTopK": _all_rows(2, 2),
    "Matmul": _matmul,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Reshape": _reshape,
    "Slice": _slice,
    "SparseCategoricalCrossentropy": _all_rows(2),
    "Take": _take,
    "TakeAlongAxis": _take_along,
    "Tensordot": _tensordot,
    "Tile": _tile,
    "TopK": _with_rank(2),
    "Transpose": _transpose,
    "Where": _where,
}
"""The rule of every known operation of `keras.ops`, by the name of its class."""

_TAKE_COUNTS = ("BroadcastTo", "GetItem", "Reshape", "Slice")
"""Operations whose rules know what the number of rows in a shape means."""


# ------------------------------------------------------------------------- following code


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
        symbols = keras.tree.map_structure(
            lambda leaf: _symbol(
                leaf, stand_in=stand_in, rows=rows, batch=_shape_of(leaf)[:1] == (None,)
            ),
            (args, kwargs),
        )
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
    shapes = [_shape_of(leaf) for leaf in keras.tree.flatten(inputs)]
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
                if tensor is None or not hasattr(tensor, "shape"):
                    continue
                rank, each = len(_shape_of(tensor)), _each_of(tensor)
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
        if is_batch_norm(layer) or _is_known(layer):
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
                if keras.utils.is_keras_tensor(tensor) and _each_of(tensor) not in (None, 1):
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
        attributes = [option for _, option in _options(op)]
        counts = any(isinstance(x, RowCount) for x in (*leaves, *keras.tree.flatten(attributes)))
        if (counts or _counts_in(args)) and name not in _TAKE_COUNTS:
            self.refuse(_NUMBER)
        operands = _operands((*args, *kwargs.values()))
        if name != "Reshape":
            self.note(name, attributes, args, kwargs)
        if all(operand.each is None for operand in (*operands, *_in_attributes(op))):
            if counts:
                self.refuse(_NUMBER)
            if name == "Reshape":
                self.note(name, attributes, args, kwargs)
            return self._rows_like(op.compute_output_spec(*args, **kwargs), None)
        each = RULES[name](op, operands, args + tuple(kwargs.values())) if operands else None
        if each is None:
            self.refuse(name)
        if name == "Reshape":
            shape = _reshaped(op, operands[0])
            # The number of rows may be written as -1, as a count, or as a number.
            self.note(name, [each, (shape or ())[1:]], args[:1], {})
            first = operands[0].shape[0]
            if first is not None and shape is not None:
                shape = (first * (each or 1) // (operands[0].each or 1), *shape[1:])
            spec = keras.KerasTensor(shape, args[0].dtype)
        elif name in _TAKE_COUNTS and counts | _counts_in(args):
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
        for operand in operands:
            if operand.each is None and not _is_for_all_rows(layer, operand.shape):
                self.refuse(name)
            if operand.each is not None and operand.rank < 2 and name not in OF_ANY_RANK:
                self.refuse(name)  # the last dim is the batch
        if len(each) != 1 or (together and each != {1}):
            self.refuse(name)
        if name in OF_ANY_RANK and len(operands) > 1 and _aligned(operands) is None:
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

    # ------------------------------------------------------------------- calls without rows

    def shape(self, x: Any) -> tuple[Any, ...]:
        """Return the shape of a symbolic tensor, with the number of its rows."""
        each = _each_of(x)
        shape = tuple(x.shape)
        return shape if each is None else (RowCount(each), *shape[1:])

    def made(self, shape: Any, dtype: Any) -> Any:
        """Return a tensor with equal or random entries for each row of the batch."""
        first, *rest = shape
        if not isinstance(first, RowCount) or any(type(dim) is not int for dim in rest):
            self.refuse(_NUMBER)
        self.note("made", [shape, dtype], (), {})
        dtype = keras.config.floatx() if dtype is None else dtype
        shape = (self._first(first.each), *rest)
        return self._rows_like(keras.KerasTensor(shape, dtype), first.each)

    def repeated(self, x: Any, shape: Any) -> Any:
        """Return a tensor of one row, repeated for each row of the batch."""
        before = _shape_of(x)
        one = len(before) < len(shape) or (len(before) == len(shape) and before[0] == 1)
        if not _is_tensor(x) or _each_of(x) is not None or not one:
            self.refuse("the rows of one tensor repeated for all rows")
        self.note("repeated", [], (x,), {})
        return self.made(shape, keras.backend.standardize_dtype(x.dtype))

    def drawn(self, name: str, draw: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what a function of `keras.random` draws for each row of the batch."""
        given = dict(zip(_RANDOM[name], args, strict=False)) | kwargs
        seed = given.get("seed")
        tensors = [v for k, v in given.items() if k not in ("shape", "inputs") and _shape_of(v)]
        if not (seed is None or isinstance(seed, keras.random.SeedGenerator)) or tensors:
            self.refuse("random numbers that replicas would share")
        if seed is not None and id(seed) not in self._held:
            self.refuse("it draws from a seed generator that the model does not hold")
        self.draws_without_seed |= seed is None
        if name == "dropout":
            x = given["inputs"]
            if _each_of(x) is None or given.get("noise_shape") is not None:
                self.refuse("random numbers for all rows together")
            self.note(name, [id(seed), given["rate"]], (x,), {})
            return self._rows_like(keras.KerasTensor(x.shape, x.dtype), _each_of(x))
        if not _counts_in((given["shape"],)):
            self.refuse("random numbers for all rows together")
        integer = "int32" if name == "randint" else None
        self.note(name, [id(seed), *map(repr, given.values())], (), {})
        return self.made(given["shape"], given.get("dtype") or integer)

    # ------------------------------------------------------------------- inside

    def fail(self, reason: str) -> None:
        """Refuse the layer that is followed when its call has returned."""
        self._failure = self._failure or reason

    def refuse(self, reason: str) -> None:
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
    """Return the tensors among the arguments of a call, in order; a list of numbers is one."""
    found = []
    for value in values:
        leaves = keras.tree.flatten(value)
        if any(_is_tensor(leaf) for leaf in leaves):
            tensors = [leaf for leaf in leaves if _is_tensor(leaf)]
            found += [Operand(_shape_of(leaf), _each_of(leaf)) for leaf in tensors]
        elif isinstance(value, list | tuple) and not _counts_in((value,)):
            shape = np.shape(value) if all(isinstance(x, int | float) for x in leaves) else ()
            found += [Operand(shape, None)] if shape else []
    return found


def _is_tensor(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _counts_in(values: tuple[Any, ...]) -> bool:
    """Return whether a number of rows is among these arguments, in slices too."""
    leaves = keras.tree.flatten(values)
    leaves += [part for x in leaves if isinstance(x, slice) for part in (x.start, x.stop, x.step)]
    return any(isinstance(leaf, RowCount) for leaf in leaves)


def _shape_of(value: Any) -> tuple[int | None, ...]:
    shape = getattr(value, "shape", None)
    return () if shape is None else tuple(shape)


def _each_of(tensor: Any) -> int | None:
    return getattr(tensor, "_lockstep_each", None)


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
    return any(None in _shape_of(leaf)[1:] for leaf in keras.tree.flatten(tree))


def _spec_with_masks(layer: Any, args: Any, kwargs: Any) -> Any:
    """Return the shapes and dtypes of a layer's outputs, with those of their masks."""
    inputs = [leaf for leaf in keras.tree.flatten((args, kwargs)) if _is_tensor(leaf)]
    # On JAX, Keras takes no `None` in a list.
    masks = {str(n): get_keras_mask(leaf) for n, leaf in enumerate(inputs)}
    masks = {n: mask for n, mask in masks.items() if mask is not None}
    has_mask: list[bool] = []

    def call(args: Any, kwargs: Any, masks: Any) -> Any:
        leaves = [leaf for leaf in keras.tree.flatten((args, kwargs)) if _is_tensor(leaf)]
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


def _in_words(error: Exception) -> str:
    if isinstance(error, NotRowByRow):
        # keras/src/utils/traceback_utils.py, inject_argument_info_in_traceback, wraps the
        # message of an error from a layer's call in bold, once for each enclosing layer.
        return str(error).split("\x1b[1m")[-1].split("\x1b[0m")[0]
    if "KerasTensor" in str(error):  # keras/src/backend/common/keras_tensor.py
        return "it calls more than Keras's layers and keras.ops"
    return f"{type(error).__name__} while it was followed"


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
            if follower is None or not _counts_in((shape,)):
                return plain(shape, *args, **kwargs)
            given = dict(zip(("dtype",), args, strict=False)) | kwargs
            return follower.made(shape, given.get("dtype"))

        return fill

    @staticmethod
    def full(plain: Any) -> Any:
        @functools.wraps(plain)
        def full(shape: Any, fill_value: Any, dtype: Any = None) -> Any:
            follower = _follower()
            if follower is None or not _counts_in((shape,)):
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
            if follower is None or not _counts_in((shape,)) or keras.utils.is_keras_tensor(x):
                return plain(x, shape)
            return follower.repeated(x, shape)

        return broadcast_to

    @staticmethod
    def tile(plain: Any) -> Any:
        @functools.wraps(plain)
        def tile(x: Any, repeats: Any) -> Any:
            follower = _follower()
            if follower is None or not _counts_in((repeats,)):
                return plain(x, repeats)
            if len(repeats) != len(_shape_of(x)) or any(r != 1 for r in repeats[1:]):
                follower.refuse("Tile")
            return follower.repeated(x, (repeats[0], *_shape_of(x)[1:]))

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
            return follower.repeated(x, (repeats, *_shape_of(x)[1:]))

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


# ------------------------------------------------------------------------- declared by its author


def is_declared(layer: Any) -> bool:
    """Return whether the author of a layer or function declared it by `lockstep.rowwise`."""
    return bool(getattr(layer, "_lockstep_rowwise", False))


@contextmanager
def untouched_random_numbers() -> Iterator[None]:
    """Make random numbers after the context independent of draws inside it."""

    def has_seeds() -> bool:
        return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is not None

    python, numpy, had_seeds = random.getstate(), np.random.get_state(), has_seeds()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if has_seeds() and not had_seeds:
            # keras/src/random/seed_generator.py, global_seed_generator: created again, as
            # the step would. This draws from Python's random numbers.
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
            global_seed_generator()
