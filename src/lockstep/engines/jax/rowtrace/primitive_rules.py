"""Rules for JAX's primitives: how the results of an operation depend on the rows of its operands.

A rule gets an operation of which at least one operand has rows and the others are the same for
all rows. It returns the label of the results, and raises `RowsMeet` if rows are combined. Every
rule holds for all numbers of rows. The walk checks the sizes of the results afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

from lockstep.engines.jax.rowtrace.row_labels import (
    COLUMNS,
    DATA,
    FALSE,
    NUMBER,
    UNIFORM,
    Label,
    Rows,
    RowsMeet,
    Same,
    Total,
    aligned,
    rows_among,
    same_places,
)
from lockstep.engines.jax.rowtrace.traced_operation import Operation, agree, dims_of_rows, named

OVER_ROWS = "over rows"
CUTS = "selects some of the rows"
BY_NUMBER = "selects rows by index"
OTHER_ROWS = "combines rows with other rows"
NO_RULE = "is not known to work row by row"


ELEMENTWISE = named(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
    digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac
    imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi
    name ne neg nextafter not one_minus_square or polygamma population_count pow random_clone
    random_fold_in random_gamma_grad random_seed random_unwrap random_wrap real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    threefry2x32 xor zeta
    """
)
"""Primitives whose result has the shape of its operands, entry by entry."""

BATCHED_LINEAR_ALGEBRA = {
    "cholesky": 2,
    "eig": 2,
    "eigh": 2,
    "householder_product": 2,
    "lu": 2,
    "lu_pivots_to_permutation": 1,
    "qr": 2,
    "svd": 2,
    "triangular_solve": 2,
}
"""The number of last dims that an operation combines."""

OF_KERAS = "key<row"
"""How the type of a key begins that Keras has drawn, in a part: see `row_draws.PartKeys`."""

RANDOM_DRAWS = named("random_bits random_split random_gamma rng_bit_generator")


CALLS = named(
    """
    jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr call_hi_primitive
    """
)
"""Operations that only call another program."""

FOLLOWED = CALLS | {"scan", "while", "cond", "custom_linear_solve"}


def by_rule(operation: Operation) -> Label | list[Label]:
    """Return the label of the results of an operation on rows, or one for each result.

    Raises:
        RowsMeet: If rows are combined, or the primitive has no rule.
    """
    if operation.name in ELEMENTWISE:
        return aligned(operation.rows)
    if rule := rule_of(operation.name):
        return rule(operation)
    raise RowsMeet(NO_RULE)


# ------------------------------------------------------------------------------------- shapes


def _broadcast(operation: Operation) -> Label:
    (label,) = operation.rows
    return replace(label, dim=operation.params["broadcast_dimensions"][label.dim])


def _reshape(operation: Operation) -> Label:
    (label,), old, new = operation.rows, operation.shape(0), operation.made(0)
    dims = dims_of_rows(new) if len({len(shape) for shape in new}) == 1 else []
    if len(dims) != 1:
        raise RowsMeet(CUTS)
    (dim,) = dims
    before, after = prod(new[0][:dim]), prod(new[0][dim + 1 :])
    size = label.outer * label.each
    ways = range(1, size + 1) if label.content in (UNIFORM, FALSE) else [label.outer]
    for outer in ways:
        outside = outer * prod(old[: label.dim])
        inside, rest = divmod(size * prod(old[label.dim + 1 :]), outer)
        if not rest and before and after and not outside % before and not inside % after:
            made = replace(label, dim=dim, outer=outside // before, each=inside // after)
            alone = not (before % prod(old[: label.dim]) or after % prod(old[label.dim + 1 :]))
            # Entries that were equal along their dim differ along other dims that joined it.
            return made if label.content != UNIFORM or alone else replace(made, content=DATA)
    raise RowsMeet(CUTS)


def _transpose(operation: Operation) -> Label:
    (label,) = operation.rows
    return replace(label, dim=operation.params["permutation"].index(label.dim))


def _tile(operation: Operation) -> Label:
    (label,) = operation.rows
    agree(operation.param("reps"))
    return replace(label, outer=label.outer * operation.params["reps"][label.dim])


def _stack(operation: Operation) -> Label:
    label = aligned(operation.rows)
    return replace(label, dim=label.dim + (operation.params["axis"] <= label.dim), content=DATA)


def _unstack(operation: Operation) -> Label:
    (label,), axis = operation.rows, operation.params["axis"]
    if axis == label.dim:
        raise RowsMeet(BY_NUMBER)
    return replace(label, dim=label.dim - (axis < label.dim))


def _concatenate(operation: Operation) -> Label:
    rows, dim = operation.rows, operation.params["dimension"]
    if all(label.dim != dim for label in rows):
        return replace(aligned(rows), content=DATA)
    each = next((label.each for label in rows if label.content == DATA), rows[0].each)
    outer = 0
    for label in rows:
        uniform = label.content in (UNIFORM, FALSE)
        if label.dim != dim or (label.outer * label.each % each if uniform else label.each != each):
            raise RowsMeet(OTHER_ROWS)
        outer += label.outer * label.each // each
    if len(rows) < len(operation.labels):
        raise RowsMeet("pads the dim of the rows")
    return Rows(dim, outer, each)


def _pad(operation: Operation) -> Label:
    label = operation.labels[0]
    if not isinstance(label, Rows) or len(operation.rows) > 1:
        raise RowsMeet("uses rows as fill values")
    agree(operation.param("padding_config"))
    if tuple(operation.params["padding_config"][label.dim]) != (0, 0, 0):
        raise RowsMeet("pads the dim of the rows")
    return replace(label, content=DATA if label.content == FALSE else label.content)


def _part(label: Rows, starts: Sequence[int], stops: Sequence[int], operation: Operation) -> Label:
    """Return the label of a slice of the dim of the rows, given for each trace."""
    whole = [shape[label.dim] for shape in operation.shapes(0)]
    if not any(starts) and list(stops) == whole:
        return label
    found = set()
    for start, stop, rows in zip(starts, stops, operation.sizes, strict=True):
        found.add((*divmod(start, rows * label.each), *divmod(stop, rows * label.each)))
    if len(found) > 1:
        raise RowsMeet(CUTS)
    ((first, before, last, after),) = found
    if before or after or first >= last:
        raise RowsMeet(CUTS)
    return replace(label, outer=last - first)


def _slice(operation: Operation) -> Label:
    (label,) = operation.rows
    strides = operation.params["strides"]
    if strides and strides[label.dim] != 1:
        raise RowsMeet(CUTS)
    starts, stops = operation.param("start_indices"), operation.param("limit_indices")
    for bounds in (starts, stops):
        agree([(*each[: label.dim], *each[label.dim + 1 :]) for each in bounds])
    first, last = ([each[label.dim] for each in bounds] for bounds in (starts, stops))
    return _part(label, first, last, operation)


def _split(operation: Operation) -> Label | list[Label]:
    (label,) = operation.rows
    if operation.params["axis"] != label.dim:
        agree(operation.param("sizes"))
        return label
    stops = [list(accumulate(sizes)) for sizes in operation.param("sizes")]
    starts = [[0, *each[:-1]] for each in stops]
    parts = zip(zip(*starts, strict=True), zip(*stops, strict=True), strict=True)
    return [_part(label, start, stop, operation) for start, stop in parts]


def _dynamic_slice(operation: Operation) -> Label:
    label, sizes = operation.labels[0], operation.param("slice_sizes")
    if not isinstance(label, Rows) or len(operation.rows) > 1:
        raise RowsMeet(CUTS)
    agree([(*each[: label.dim], *each[label.dim + 1 :]) for each in sizes])
    whole = [shape[label.dim] for shape in operation.shapes(0)]
    if [each[label.dim] for each in sizes] != whole:
        raise RowsMeet(CUTS)
    return label


def _dynamic_update_slice(operation: Operation) -> Label:
    if len(operation.rows) != 2 or not all(isinstance(x, Rows) for x in operation.labels[:2]):
        raise RowsMeet(CUTS)
    return replace(aligned(operation.rows), content=DATA)


# --------------------------------------------------------------------- reductions and products


def _reduce(operation: Operation) -> Label:
    label, name = aligned(operation.rows), operation.name
    axes = operation.params["axes" if "axes" in operation.params else "dimensions"]
    if label.dim not in axes:
        return replace(label, dim=label.dim - sum(axis < label.dim for axis in axes))
    if name == "reduce_sum":
        return Total(0, operation.place)
    if label.content == UNIFORM and name in ("reduce_max", "reduce_min", "reduce_and", "reduce_or"):
        return Same()
    raise RowsMeet(OVER_ROWS)


def _along(key: str) -> Callable[[Operation], Label]:
    """Return the rule of operations along dims, which must not be that of the rows."""

    def rule(operation: Operation) -> Label:
        label, params = aligned(operation.rows), operation.params
        # JAX 0.7 sorts the last dim alone in `top_k`.
        dims = -1 if operation.name == "top_k" and key not in params else params[key]
        dims = dims if isinstance(dims, tuple) else (dims,)
        if label.dim in {dim % len(operation.shape(0)) for dim in dims}:
            raise RowsMeet(OVER_ROWS)
        return replace(label, content=DATA)

    return rule


def _fft(operation: Operation) -> Label:
    (label,) = operation.rows
    if label.dim >= len(operation.shape(0)) - len(operation.params["fft_lengths"]):
        raise RowsMeet(OVER_ROWS)
    return label


def _linear_algebra(operation: Operation) -> Label:
    label = aligned(operation.rows)
    ranks = [len(operation.shape(n)) for n, x in enumerate(operation.labels) if isinstance(x, Rows)]
    if label.dim >= min(ranks) - BATCHED_LINEAR_ALGEBRA[operation.name]:
        raise RowsMeet(OVER_ROWS)
    return label


def _window(operation: Operation) -> Label:
    label, params = aligned(operation.rows), operation.params
    steps = [params[key][label.dim] for key in ("window_dimensions", "window_strides")]
    steps += [params[key][label.dim] for key in ("base_dilation",) if key in params]
    if any(step != 1 for step in steps) or tuple(params["padding"][label.dim]) != (0, 0):
        raise RowsMeet(OVER_ROWS)
    return replace(label, content=DATA)


def _dot(operation: Operation) -> Label:
    contracted, batch = operation.params["dimension_numbers"]
    left, right = operation.labels
    if isinstance(left, Rows) and isinstance(right, Rows):
        pair, firm = (left.dim, right.dim), left if right.content == UNIFORM else right
        if same_places(left, right) and pair in zip(*batch, strict=True):
            return Rows(batch[0].index(left.dim), firm.outer, firm.each)
        if same_places(left, right) and pair in zip(*contracted, strict=True):
            return Total(0, operation.place)
        raise RowsMeet(OTHER_ROWS)
    side = 0 if isinstance(left, Rows) else 1
    (label,), used = operation.rows, {*contracted[side], *batch[side]}
    if label.dim in used:
        raise RowsMeet(OVER_ROWS)
    free = [dim for dim in range(len(operation.shape(side))) if dim not in used]
    before = len(batch[0]) if side == 0 else len(operation.shape(0)) - len(contracted[0])
    return replace(label, dim=before + free.index(label.dim))


def _convolution(operation: Operation) -> Label:
    data, kernel = operation.labels
    dims = operation.params["dimension_numbers"]
    if not isinstance(kernel, Same) or not isinstance(data, Rows):
        raise RowsMeet("has a separate kernel for each row")
    if operation.params["batch_group_count"] != 1 or data.dim != dims.lhs_spec[0]:
        raise RowsMeet(OVER_ROWS)
    return replace(data, dim=dims.out_spec[0])


# ------------------------------------------------------------------------- indices and draws


def _gather(operation: Operation) -> Label:
    operand, index = operation.labels
    dims, rank = operation.params["dimension_numbers"], len(operation.shape(0))
    window = operation.param("slice_sizes")
    results = len(operation.made(0)[0])
    indexed = [dim for dim in range(results) if dim not in dims.offset_dims]
    if isinstance(index, Rows) and index.dim == len(operation.shape(1)) - 1:
        raise RowsMeet("uses rows as an index")
    if not isinstance(operand, Rows):
        agree(window)
        if not isinstance(index, Rows) or index.content == COLUMNS:
            raise RowsMeet(BY_NUMBER)
        return Rows(indexed[index.dim], index.outer, index.each)
    agree([(*each[: operand.dim], *each[operand.dim + 1 :]) for each in window])
    if not isinstance(index, Rows):
        apart = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
        kept = [dim for dim in range(rank) if dim not in apart]
        whole = [shape[operand.dim] for shape in operation.shapes(0)]
        if operand.dim in kept and [each[operand.dim] for each in window] == whole:
            return replace(operand, dim=dims.offset_dims[kept.index(operand.dim)])
    elif _is_own(operand, index, dims.operand_batching_dims, dims.start_indices_batching_dims):
        return Rows(indexed[index.dim], index.outer, index.each)
    elif operand.dim in dims.collapsed_slice_dims and _numbers_own(
        operand, index, dims.start_index_map
    ):
        return Rows(indexed[index.dim])
    raise RowsMeet(BY_NUMBER)


def _scatter(operation: Operation) -> Label:
    operand, index, updates = operation.labels
    dims, rank = operation.params["dimension_numbers"], len(operation.shape(0))
    if not isinstance(operand, Rows) or not isinstance(updates, Rows):
        raise RowsMeet("writes rows into an array without rows")
    windows = dims.update_window_dims
    indexed = [dim for dim in range(len(operation.shape(2))) if dim not in windows]
    if same_places(operand, updates):
        made = updates if operand.content in (UNIFORM, FALSE) else operand
        made = Rows(operand.dim, made.outer, made.each)
        if not isinstance(index, Rows):
            apart = {*dims.inserted_window_dims, *dims.operand_batching_dims}
            kept = [dim for dim in range(rank) if dim not in apart]
            if made.dim in kept and windows[kept.index(made.dim)] == updates.dim:
                return made
        elif index.dim < len(operation.shape(1)) - 1 and indexed[index.dim] == updates.dim:
            pairs = dims.operand_batching_dims, dims.scatter_indices_batching_dims
            if _is_own(made, index, *pairs):
                return made
            if made.dim in dims.inserted_window_dims and _numbers_own(
                made, index, dims.scatter_dims_to_operand_dims
            ):
                return made
    raise RowsMeet(BY_NUMBER)


def _is_own(operand: Rows, index: Rows, batch: Sequence[int], of_index: Sequence[int]) -> bool:
    """Whether each row of the index only selects in its own row, as `vmap` makes them."""
    same = (operand.outer, operand.each) == (index.outer, index.each)
    pairs = zip(batch, of_index, strict=True)
    return same and index.content != COLUMNS and (operand.dim, index.dim) in pairs


def _numbers_own(operand: Rows, index: Rows, columns: Sequence[int]) -> bool:
    """Whether the index has the number of each row in the column that selects rows."""
    single = operand.outer * operand.each * index.outer * index.each == 1
    at = [column for column, dim in enumerate(columns) if dim == operand.dim]
    return single and bool(at) and index.columns == frozenset(at)


def _bits(operation: Operation) -> Label:
    if not isinstance(operation.labels[0], Rows):
        raise RowsMeet(NO_RULE)
    return replace(operation.labels[0], content=DATA)


def of_numbers(operation: Operation) -> Label:
    """Return the label of the results of an operation on the numbers of the rows.

    Such a number may only become an index, with which each row selects in itself.

    Raises:
        RowsMeet: If the results are no such index.
    """
    name, labels, rows = operation.name, operation.labels, operation.rows
    first, contents = rows[0], [label.content for label in rows]
    if name in ("convert_element_type", "copy") and len(labels) == 1:
        return first
    if name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose"):
        if contents == [NUMBER] and isinstance(made := by_rule(operation), Rows):
            return made
    elif name == "lt" and contents == [NUMBER] and isinstance(zero := labels[1], Same):
        if zero.value is not None and zero.value <= 0:
            return replace(first, content=FALSE)
    elif name == "concatenate":
        last = len(operation.shape(0)) - 1
        narrow = all(operation.shape(n)[-1] == 1 for n in range(len(labels)))
        single = all((x.dim, x.outer, x.each) == (first.dim, 1, 1) for x in rows)
        along = operation.params["dimension"] == last != first.dim
        if along and narrow and single and len(rows) == len(labels) and COLUMNS not in contents:
            numbers = frozenset(n for n, content in enumerate(contents) if content == NUMBER)
            return Rows(first.dim, content=COLUMNS, columns=numbers)
    elif name == "gather" or name.startswith("scatter"):
        index, others = labels[1], [x for n, x in enumerate(labels) if n != 1]
        if isinstance(index, Rows) and index.content == NUMBER and operation.shape(1)[-1] == 1:
            index = replace(index, content=COLUMNS, columns=frozenset([0]))
        plain = not any(x.content in (NUMBER, COLUMNS) for x in rows_among(others))
        if isinstance(index, Rows) and index.content == COLUMNS and plain:
            indexed = replace(operation, labels=[labels[0], index, *labels[2:]])
            return _gather(indexed) if name == "gather" else _scatter(indexed)
    raise RowsMeet("computes with the indices of the rows")


_SCATTERS = named(
    """
    scatter scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min scatter-max
    scatter_max
    """
)

_Rule = Callable[[Operation], Label | list[Label]]
_RULES: dict[str, _Rule] = {
    "argmax": _reduce,
    "argmin": _reduce,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "expand_dims": _reshape,
    "fft": _fft,
    "gather": _gather,
    "pad": _pad,
    "random_bits": _bits,
    "random_split": _bits,
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "slice": _slice,
    "sort": _along("dimension"),
    "split": _split,
    "squeeze": _reshape,
    "stack": _stack,
    "tile": _tile,
    "top_k": _along("axis"),
    "transpose": _transpose,
    "unstack": _unstack,
    **dict.fromkeys(BATCHED_LINEAR_ALGEBRA, _linear_algebra),
    **dict.fromkeys(named("cumsum cumprod cummax cummin cumlogsumexp"), _along("axis")),
    **dict.fromkeys(_SCATTERS, _scatter),
}


def rule_of(name: str) -> _Rule | None:
    """Return the rule of a primitive that does not work entry by entry, if it has one."""
    if name.startswith("reduce_window"):
        return _window
    if name == "reduce" or name.startswith("reduce_"):
        return _reduce
    return _RULES.get(name)


def has_rule(name: str) -> bool:
    """Return whether there is a rule for rows for a primitive of this name."""
    known = name in ELEMENTWISE or name in RANDOM_DRAWS or name in FOLLOWED
    return known or name == "optimization_barrier" or rule_of(name) is not None


_OF_SAME = named("empty empty2 iota")
"""Operations without a rule for rows that give the same for the same operands."""


def is_known(operation: Operation) -> bool:
    """Return whether all that an operation does is followed, its gradient too.

    The words of a key of `row_draws` are other ones than those of the key that Keras has drawn. The
    functions of a `custom_linear_solve` are the user's: its gradient is linear if they are.
    """
    name = operation.name
    if name == "random_unwrap":
        return not str(operation.equations[0].invars[0].aval.dtype).startswith(OF_KERAS)
    return name != "custom_linear_solve" and (has_rule(name) or name in _OF_SAME)
