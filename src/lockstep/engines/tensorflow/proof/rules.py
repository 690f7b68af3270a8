"""What TensorFlow's operations make of rows.

One rule for each operation that is known. What has no rule, and what does not meet the
conditions of its rule, is unknown.
"""

from typing import Any

from lockstep.engines.tensorflow.proof.pieces import PIECES
from lockstep.engines.tensorflow.proof.states import (
    Count,
    Rows,
    Rule,
    Same,
    Seed,
    Sizes,
    State,
    attribute,
    axis_of,
    first_rows,
    rank_of,
    static,
)

_ELEMENTWISE = """
    Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BitwiseAnd BitwiseOr BitwiseXor
    Bucketize Cast Ceil CheckNumerics ClipByValue Complex Conj Cos Cosh Digamma Div DivNoNan
    Elu Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity
    Imag Inv Invert IsFinite IsInf IsNan LeakyRelu LeftShift Less LessEqual Lgamma Log Log1p
    LogicalAnd LogicalNot LogicalOr LookupTableFindV2 Maximum Minimum Mod Mul MulNoNan Neg
    NotEqual OnesLike Pow PreventGradient Real RealDiv Reciprocal Relu Relu6 RightShift Rint
    Round Rsqrt SelectV2 Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square
    SquaredDifference StopGradient Sub Tan Tanh TruncateDiv TruncateMod Xdivy Xlog1py Xlogy
    ZerosLike
"""
_LAST_DIM = "FFT IFFT LogSoftmax RFFT Softmax TopK TopKV2"
_LAST_TWO_DIMS = """
    Cholesky FFT2D IFFT2D MatrixBandPart MatrixDeterminant MatrixDiagPartV3 MatrixInverse
"""
_ALONG_AXES = """
    All Any ArgMax ArgMin Cumprod Cumsum EuclideanNorm Max Mean Min Prod ReverseV2 Sum
"""
_IMAGES = """
    AvgPool AvgPool3D DepthToSpace ExtractImagePatches LRN MaxPool MaxPool3D ResizeArea
    ResizeBicubic ResizeBilinear ResizeNearestNeighbor SpaceToDepth
"""
_FILTERED = "Conv Conv2D Conv3D DepthwiseConv2dNative Dilation2D"
_RANDOM = """
    StatelessRandomNormalV2 StatelessRandomUniformFullIntV2 StatelessRandomUniformIntV2
    StatelessRandomUniformV2 StatelessTruncatedNormalV2
"""


def aligned(tensors: list[Any], states: list[State]) -> Rows | None:
    """The rows of what broadcasting these makes, if their rows stay beside each other.

    Operands with rows have the full rank; the others a lower one, or a first dim of 1.
    """
    rows = {state for state in states if isinstance(state, Rows)}
    ranks = {rank_of(t) for t, s in zip(tensors, states, strict=True) if isinstance(s, Rows)}
    if len(rows) != 1 or len(ranks) != 1 or min(ranks) < 1:
        return None
    (rank,) = ranks
    for tensor, state in zip(tensors, states, strict=True):
        if isinstance(state, Rows):
            continue
        lower = 0 <= rank_of(tensor) < rank
        if not isinstance(state, Same) or not (lower or _is_one_row(tensor, rank)):
            return None
    return rows.pop()


def _is_one_row(tensor: Any, rank: int) -> bool:
    return rank_of(tensor) == rank and tensor.shape[0] == 1


# --------------------------------------------------------------------------- the rules


def _elementwise(op: Any, states: list[State]) -> State | None:
    if isinstance(states[0], Seed) or (len(states) > 1 and isinstance(states[1], Seed)):
        return Seed() if all(isinstance(state, Same | Seed) for state in states) else None
    if op.type in ("Cast", "Identity") and isinstance(states[0], Count | Sizes):
        return states[0] if op.outputs[0].dtype.is_integer else None
    if op.type in ("Equal", "NotEqual") and isinstance(states[0], Count | Sizes):
        return Same() if states[0] == states[1] else None  # whatever the number of rows is
    if op.type in ("Mul", "FloorDiv") and any(isinstance(state, Count) for state in states):
        return _scaled(op, states)
    tensors = list(op.inputs)
    if op.type == "LookupTableFindV2":
        tensors, states = [tensors[1]], [states[1]]
    return aligned(tensors, states)


def _scaled(op: Any, states: list[State]) -> State | None:
    numbers = [static(tensor) for tensor in op.inputs]
    for count, other in ((0, 1), (1, 0)):
        state, number = states[count], numbers[other]
        if isinstance(state, Count) and number is not None and len(number) == 1 and number[0] > 0:
            if op.type == "Mul":
                return Count(state.each * int(number[0]))
            if count == 0 and state.each % number[0] == 0:
                return Count(state.each // int(number[0]))
    return None


def _along_axes(op: Any, states: list[State]) -> State | None:
    rank = rank_of(op.inputs[0])
    axes = axis_of(op.inputs[1], rank)
    if rank < 1 or axes is None or 0 in axes:
        return None
    return first_rows(states)


def _with_rank(least: int) -> Rule:
    def rule(op: Any, states: list[State]) -> State | None:
        return first_rows(states) if rank_of(op.inputs[0]) >= least else None

    return rule


def _images(op: Any, states: list[State]) -> State | None:
    for name in ("ksize", "ksizes", "strides"):
        sizes = attribute(op, name)
        if sizes and sizes[0] != 1:
            return None
    return first_rows(states)


def _transposed_filter(op: Any, states: list[State]) -> State | None:
    sizes, filters, values = states
    if isinstance(filters, Same) and isinstance(values, Rows) and sizes == Sizes(values.each):
        return values
    return None


def _matmul(op: Any, states: list[State]) -> State | None:
    turned = attribute(op, "transpose_a") or attribute(op, "adj_x")
    if {rank_of(tensor) for tensor in op.inputs} == {2} or op.type == "MatMul":
        return None if turned else first_rows(states)
    rows = aligned(list(op.inputs), states)
    first = rank_of(op.inputs[0]) if isinstance(states[0], Rows) else rank_of(op.inputs[1])
    return rows if first >= 3 else None


def _einsum(op: Any, states: list[State]) -> State | None:
    equation = attribute(op, "equation").decode().replace(" ", "")
    inputs, _, output = equation.partition("->")
    batch = output[:1]
    spread = set()
    for labels, state, tensor in zip(inputs.split(","), states, op.inputs, strict=True):
        if isinstance(state, Rows):
            if labels[:1] != batch or labels.count(batch) != (3 if batch == "." else 1):
                return None
            spread.add(rank_of(tensor) - len(labels.replace("...", "")))
        elif not isinstance(state, Same) or batch in labels:
            return None
    rows = {state for state in states if isinstance(state, Rows)}
    if len(rows) != 1 or not batch or (batch == "." and (len(spread) != 1 or min(spread) < 1)):
        return None
    return rows.pop()


def _select(op: Any, states: list[State]) -> State | None:
    # Its first operand has the shape of the others, or one entry for each of their rows, or one.
    if rank_of(op.inputs[0]) == 0 and isinstance(states[0], Same):
        return _all_rows(op, states[1:])
    return _all_rows(op, states)


def _bitcast(op: Any, states: list[State]) -> State | None:
    return first_rows(states) if rank_of(op.inputs[0]) == rank_of(op.outputs[0]) else None


def _in_top(op: Any, states: list[State]) -> State | None:
    return _all_rows(op, states[:2]) if isinstance(states[2], Same) else None


def _one_hot(op: Any, states: list[State]) -> State | None:
    return first_rows(states) if attribute(op, "axis") != 0 else None


def _all_rows(op: Any, states: list[State]) -> State | None:
    return states[0] if len(set(states)) == 1 and isinstance(states[0], Rows) else None


def _seeds(op: Any, states: list[State]) -> State | None:
    return Seed() if all(isinstance(state, Same | Seed) for state in states) else None


def _random(op: Any, states: list[State]) -> State | None:
    """Numbers drawn for every row: each replica draws those of its own."""
    sizes, *others = states
    seeded = any(isinstance(state, Seed) for state in others)
    known = all(isinstance(state, Same | Seed) for state in others)
    return Rows(sizes.each) if isinstance(sizes, Sizes) and seeded and known else None


def _assign(op: Any, states: list[State]) -> State | None:
    variable, value = states
    if isinstance(variable, Seed):
        return Same() if isinstance(value, Same | Seed) else None
    return Same() if isinstance(value, Same) else None


def _read(op: Any, states: list[State]) -> State | None:
    return states[0] if isinstance(states[0], Same | Seed) else None


def _anything(op: Any, states: list[State]) -> State | None:
    return Same()


RULES: dict[str, Rule] = {
    **PIECES,
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_LAST_DIM.split(), _with_rank(2)),
    **dict.fromkeys(_LAST_TWO_DIMS.split(), _with_rank(3)),
    **dict.fromkeys(_ALONG_AXES.split(), _along_axes),
    **dict.fromkeys(_IMAGES.split(), _images),
    **dict.fromkeys(_FILTERED.split(), _with_rank(3)),
    **dict.fromkeys(_RANDOM.split(), _random),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), _transposed_filter),
    **dict.fromkeys(("MatMul", "BatchMatMulV2", "BatchMatMulV3", "BatchMatMul"), _matmul),
    **dict.fromkeys(
        ("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"), _all_rows
    ),
    **dict.fromkeys(("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"), _assign),
    "Assert": _anything,  # it fails, or changes nothing
    "BiasAdd": _with_rank(2),
    "Bitcast": _bitcast,
    "Einsum": _einsum,
    "InTopKV2": _in_top,
    "MatrixDiagV3": _with_rank(2),
    "NoOp": _anything,
    "OneHot": _one_hot,
    "Rank": _anything,
    "ReadVariableOp": _read,
    "Select": _select,
    "StatelessRandomGetKeyCounter": _seeds,
    "VariableShape": _anything,
}
"""The rule of every operation that is known, by its type."""
