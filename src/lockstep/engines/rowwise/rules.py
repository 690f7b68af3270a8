"""How the operations of `keras.ops` relate the first dim of their outputs to the rows of a batch.

The rules work on what Keras calls, not on what a backend executes. So they serve all
backends, and an operation has one rule even if a backend computes it in many steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from lockstep.engines.rowwise.followed_tensors import HERE, asked_by_user, refuse

Reasons = dict[int, str]
"""Why each refused part is refused, by the identity of the part."""


class NotRowByRow(Exception):
    """Code that is not known to work row by row; the message is the reason."""


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
            refuse(COUNTS_ROWS)
        raise AttributeError(name)

    def __mul__(self, other: Any) -> "RowCount":
        if type(other) is not int or other < 1:
            refuse(COUNTS_ROWS)
        return RowCount(self.each * other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> "RowCount":
        if type(other) is not int or other < 1 or self.each % other:
            refuse(COUNTS_ROWS)
        return RowCount(self.each // other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowCount) or other.each != self.each:
            refuse(COUNTS_ROWS)
        return True

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RowCount({self.each})"

    def _refuse(self, *args: Any) -> Any:
        refuse(COUNTS_ROWS)

    __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __rfloordiv__ = _refuse
    __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __int__ = __float__ = __index__ = __bool__ = __array__ = __tf_tensor__ = _refuse


COUNTS_ROWS = "it computes with the number of rows"


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


def aligned(operands: list[Operand]) -> int | None:
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
    if any(isinstance(option, list | tuple) for name, option in options_of(op)):
        return None  # numbers of an unknown shape
    return aligned([*operands, *in_attributes(op)])


def _along_axes(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
    operand = _only(operands)
    axes = getattr(op, "axis", getattr(op, "axes", None))
    if operand is None or len(operands) > 1 or axes is None or in_attributes(op):
        return None
    return operand.each if _apart_from_rows(axes, operand.rank) else None


def _apart_from_rows(axes: Any, rank: int) -> bool:
    """Return whether these axes of a tensor are known and do not include the first one."""
    flat = keras.tree.flatten(axes)
    known = all(isinstance(axis, int) and -rank <= axis < rank for axis in flat)
    return known and bool(flat) and all(axis % rank != 0 for axis in flat)


def _with_rank(least: int) -> Rule:
    def rule(op: Any, operands: list[Operand], args: tuple[Any, ...]) -> int | None:
        return None if in_attributes(op) else _each(_only(operands, least))

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
    shape = reshaped(op, operands[0])
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


def reshaped(op: Any, operand: Operand) -> tuple[int | None, ...] | None:
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
    return aligned(operands) if len(args) == 3 and args[1] is not None else None


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


def options_of(op: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an operation that its caller chose."""
    return [(k, v) for k, v in vars(op).items() if not k.startswith("_") and k != "name"]


def in_attributes(op: Any) -> list[Operand]:
    """Return the tensors that an operation keeps in its attributes."""
    leaves = keras.tree.flatten([option for _, option in options_of(op)])
    return [Operand(shape_of(leaf), each_of(leaf)) for leaf in leaves if shape_of(leaf)]


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

TAKE_COUNTS = ("BroadcastTo", "GetItem", "Reshape", "Slice")
"""Operations whose rules know what the number of rows in a shape means."""


def operands_in(values: tuple[Any, ...], each: Callable[[Any], int | None]) -> list[Operand]:
    """Return the tensors among the arguments of a call, in order; a list of numbers is one.

    Args:
        values: The arguments.
        each: Returns `Operand.each` of a tensor.
    """
    found = []
    for value in values:
        leaves = keras.tree.flatten(value)
        if any(is_tensor(leaf) for leaf in leaves):
            tensors = [leaf for leaf in leaves if is_tensor(leaf)]
            found += [Operand(shape_of(leaf), each(leaf)) for leaf in tensors]
        elif isinstance(value, list | tuple) and not counts_in((value,)):
            shape = np.shape(value) if all(isinstance(x, int | float) for x in leaves) else ()
            found += [Operand(shape, None)] if shape else []
    return found


def is_tensor(leaf: Any) -> bool:
    """Return whether a value has a shape and a dtype."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def counts_in(values: tuple[Any, ...]) -> bool:
    """Return whether a number of rows is among these arguments, in slices too."""
    leaves = keras.tree.flatten(values)
    leaves += [part for x in leaves if isinstance(x, slice) for part in (x.start, x.stop, x.step)]
    return any(isinstance(leaf, RowCount) for leaf in leaves)


def shape_of(value: Any) -> tuple[int | None, ...]:
    """Return the shape of a tensor, and none of another value."""
    shape = getattr(value, "shape", None)
    return () if shape is None else tuple(shape)


def each_of(tensor: Any) -> int | None:
    """Return how many entries of the first dim belong to a row, `None` if it is no batch."""
    return getattr(tensor, "_lockstep_each", None)


def has_unknown_dims(tree: Any) -> bool:
    """Return whether a tensor has an unknown dim besides the rows."""
    return any(None in shape_of(leaf)[1:] for leaf in keras.tree.flatten(tree))


def in_words(error: Exception) -> str:
    """Return why code that ends in an error is not known to work row by row."""
    if isinstance(error, NotRowByRow):
        # keras/src/utils/traceback_utils.py, inject_argument_info_in_traceback, wraps the
        # message of an error from a layer's call in bold, once for each enclosing layer.
        return str(error).split("\x1b[1m")[-1].split("\x1b[0m")[0]
    if "KerasTensor" in str(error):  # keras/src/backend/common/keras_tensor.py
        return "it calls functions other than Keras layers and keras.ops"
    return f"its code raises {type(error).__name__} with symbolic tensors"
