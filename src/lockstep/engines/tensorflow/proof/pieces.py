"""What becomes of rows where a tensor is taken apart, put together, or laid out anew."""

import math
from typing import Any

import tensorflow as tf

from lockstep.engines.tensorflow.proof.numbers import numbers
from lockstep.engines.tensorflow.proof.states import (
    Count,
    Rows,
    Rule,
    Same,
    Sizes,
    State,
    attribute,
    axis_of,
    first_rows,
    rank_of,
    static,
)


def _reshape(op: Any, states: list[State]) -> State | None:
    state, sizes = states
    if not isinstance(state, Rows):
        return None
    # The values are kept in their order, so a row of the batch stays one block. How large
    # a block is, is known by its dims, or by the first dim being the rows again.
    if sizes == Sizes(state.each):
        return state
    before, after = op.inputs[0].shape, _dims_after(op)
    if not after or after[0] is not None or None in after[1:]:
        return None
    if not before[1:].is_fully_defined():
        return None
    inner = [dim for dim in after[1:] if dim is not None]
    block, entry = state.each * math.prod(before[1:]), math.prod(inner)
    return Rows(block // entry) if entry and block and block % entry == 0 else None


def _dims_after(op: Any) -> list[int | None]:
    """The dims that a reshape gives, each `None` where it is not known."""
    shape, asked = op.outputs[0].shape, numbers(op.inputs[1])
    dims = [None] * (0 if asked is None else len(asked)) if shape.rank is None else shape.as_list()
    if asked is None or len(asked) != len(dims):
        return dims
    return [
        dim if dim is not None or other is None or other < 0 else int(other)
        for dim, other in zip(dims, asked, strict=True)
    ]


def _transpose(op: Any, states: list[State]) -> State | None:
    order = static(op.inputs[1])
    return first_rows(states) if order and order[0] == 0 else None


def _expand(op: Any, states: list[State]) -> State | None:
    if isinstance(states[0], Count) and isinstance(states[1], Same):
        return Sizes(states[0].each)
    axes = axis_of(op.inputs[1], rank_of(op.outputs[0]))
    return first_rows(states) if axes and 0 not in axes else None


def _squeeze(op: Any, states: list[State]) -> State | None:
    rank = rank_of(op.inputs[0])
    axes = [axis + rank if axis < 0 else axis for axis in attribute(op, "squeeze_dims") or []]
    return first_rows(states) if rank > 0 and axes and 0 not in axes else None


def _strided_slice(op: Any, states: list[State]) -> State | None:
    mask = {
        name: attribute(op, f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    begin, end, strides = (static(tensor) for tensor in op.inputs[1:])
    if isinstance(states[0], Sizes):
        return _part_of_sizes(op, states[0], begin, end, strides, mask)
    if strides is None or not strides or first_rows(states) is None:
        return None
    if mask["ellipsis"] & 1 and not mask["new_axis"] & 1:
        rank, named = rank_of(op.inputs[0]), len(strides) - 1
        named -= bin(mask["new_axis"]).count("1")
        return states[0] if rank > named >= 0 else None
    untouched = mask["begin"] & mask["end"] & 1 and strides[0] == 1
    changed = (mask["new_axis"] | mask["shrink_axis"]) & 1
    return states[0] if untouched and not changed else None


def _part_of_sizes(
    op: Any, state: Sizes, begin: Any, end: Any, strides: Any, mask: dict[str, int]
) -> State | None:
    length = op.inputs[0].shape[0]
    if begin is None or strides != [1] or length is None or mask["ellipsis"] or mask["new_axis"]:
        return None
    first = 0 if mask["begin"] & 1 else begin[0]
    first += length if first < 0 else 0
    if first > 0:
        return Same()
    if mask["shrink_axis"]:
        return Count(state.each) if first == 0 else None
    if not mask["end"] & 1 and (end is None or end[0] + (length if end[0] < 0 else 0) < 1):
        return None
    return Sizes(state.each)


def _slice(op: Any, states: list[State]) -> State | None:
    begin, size = (static(tensor) for tensor in op.inputs[1:])
    state, _, sizes = states
    if isinstance(state, Sizes):
        if not begin or not size or begin[0] > 0:
            return Same() if begin and size else None
        return Sizes(state.each) if size[0] != 0 else None
    if not isinstance(state, Rows) or not begin or begin[0] != 0:
        return None
    whole = (size and size[0] == -1 and isinstance(sizes, Same)) or sizes == Sizes(state.each)
    return state if whole else None


def _joined(states: list[State], axes: Any) -> State | None:
    alike = len(set(states)) == 1 and isinstance(states[0], Rows)
    return states[0] if alike and axes and 0 not in axes else None


def _concat(op: Any, states: list[State]) -> State | None:
    if isinstance(states[0], Sizes) and all(isinstance(state, Same) for state in states[1:]):
        return states[0]
    return _joined(states[:-1], axis_of(op.inputs[-1], rank_of(op.outputs[0])))


def _pack(op: Any, states: list[State]) -> State | None:
    if isinstance(states[0], Count) and all(isinstance(state, Same) for state in states[1:]):
        return Sizes(states[0].each)
    rank, axis = rank_of(op.outputs[0]), attribute(op, "axis")
    return _joined(states, [axis + rank if axis < 0 else axis])


def _unpack(op: Any, states: list[State]) -> State | None:
    rank, axis = rank_of(op.inputs[0]), attribute(op, "axis")
    axis += rank if axis < 0 else 0
    return states[0] if rank > 0 and axis > 0 and isinstance(states[0], Rows) else None


def _split(op: Any, states: list[State]) -> State | None:
    axis, value = (0, 1) if op.type == "Split" else (2, 0)
    axes = axis_of(op.inputs[axis], rank_of(op.inputs[value]))
    others = [state for n, state in enumerate(states) if n != value]
    if not axes or 0 in axes or not all(isinstance(state, Same) for state in others):
        return None
    return states[value] if isinstance(states[value], Rows) else None


def _tile(op: Any, states: list[State]) -> State | None:
    value, times = states
    if isinstance(value, Same) and isinstance(times, Sizes):
        return Rows(times.each) if op.inputs[0].shape[:1] == [1] else None
    counts = tf.get_static_value(op.inputs[1], partial=True)
    keeps = counts is not None and len(counts) and counts[0] == 1
    return first_rows(states) if keeps else None


def _pad(op: Any, states: list[State]) -> State | None:
    widths = static(op.inputs[1])
    return first_rows(states) if widths and widths[:2] == [0, 0] else None


def _gather(op: Any, states: list[State]) -> State | None:
    params, indices, axis = states
    axes = axis_of(op.inputs[2], rank_of(op.inputs[0]))
    if not axes or not isinstance(axis, Same) or rank_of(op.inputs[0]) < 1:
        return None
    if isinstance(params, Sizes) and isinstance(indices, Same):
        return _entries_of_sizes(op, params)
    batched = attribute(op, "batch_dims") or 0
    if isinstance(params, Same) and isinstance(indices, Rows):
        return indices if axes == [0] and batched == 0 else None
    if isinstance(params, Rows) and isinstance(indices, Same):
        return params if axes[0] > 0 and batched == 0 else None
    return params if batched > 0 and params == indices and isinstance(params, Rows) else None


def _entries_of_sizes(op: Any, state: Sizes) -> State | None:
    chosen = static(op.inputs[1])
    if chosen is None or any(number < 0 for number in chosen):
        return None
    if 0 not in chosen:
        return Same()
    scalar = rank_of(op.inputs[1]) == 0
    if 0 in chosen[1:] or chosen[0] != 0:
        return None
    return Count(state.each) if scalar else Sizes(state.each)


def _resource_gather(op: Any, states: list[State]) -> State | None:
    table, indices = states
    known = isinstance(table, Same) and isinstance(indices, Rows)
    return indices if known and not attribute(op, "batch_dims") else None


def _gather_nd(op: Any, states: list[State]) -> State | None:
    params, indices = states
    known = isinstance(params, Same) and isinstance(indices, Rows)
    return indices if known and rank_of(op.inputs[1]) >= 2 else None


def _shape(op: Any, states: list[State]) -> State | None:
    if isinstance(states[0], Sizes):
        return Same()  # the length of a shape
    return Sizes(states[0].each) if isinstance(states[0], Rows) else None


def _fill(op: Any, states: list[State]) -> State | None:
    sizes, value = states
    return Rows(sizes.each) if isinstance(sizes, Sizes) and isinstance(value, Same) else None


def _broadcast(op: Any, states: list[State]) -> State | None:
    value, sizes = states
    before, after = rank_of(op.inputs[0]), rank_of(op.outputs[0])
    if not isinstance(sizes, Sizes) or after < 1 or before < 0:
        return None
    if isinstance(value, Rows):
        return value if value.each == sizes.each and before == after else None
    one = before < after or op.inputs[0].shape[0] == 1
    return Rows(sizes.each) if isinstance(value, Same) and one else None


PIECES: dict[str, Rule] = {
    **dict.fromkeys(("Split", "SplitV"), _split),
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), _pad),
    "BroadcastTo": _broadcast,
    "ConcatV2": _concat,
    "ExpandDims": _expand,
    "Fill": _fill,
    "GatherNd": _gather_nd,
    "GatherV2": _gather,
    "Pack": _pack,
    "Reshape": _reshape,
    "ResourceGather": _resource_gather,
    "Shape": _shape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "StridedSlice": _strided_slice,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unpack": _unpack,
}
"""Their rules, by the type of the operation; see `lockstep.engines.tensorflow.proof.rules`."""
