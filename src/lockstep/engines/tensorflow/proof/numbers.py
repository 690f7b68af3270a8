"""The numbers of small tensors, shapes mostly, that are known while tracing."""

import operator
from typing import Any

import numpy as np
import tensorflow as tf

_ARITHMETIC = {"Add": operator.add, "AddV2": operator.add, "Sub": operator.sub}


def numbers(tensor: Any) -> np.ndarray | None:
    """What is known of a tensor: an array with `None` in the place of each unknown number.

    Args:
        tensor: A tensor of a graph.

    Returns:
        `None` where not even its shape is known, or where an operation makes it that is
        none of those by which shapes are made.
    """
    value = tf.get_static_value(tensor)
    if value is not None:
        return np.asarray(value, object)
    op = tensor.op
    if op.type == "Shape" and op.inputs[0].shape.rank is not None:
        return np.array(op.inputs[0].shape.as_list(), object)
    if op.type not in _MADE_OF and op.type not in _ARITHMETIC:
        return None
    known = [part for part in map(numbers, op.inputs) if part is not None]
    if len(known) < len(op.inputs):
        return None
    if op.type in _MADE_OF:
        made: np.ndarray | None = _MADE_OF[op.type](op, known)
        return made
    if any(number is None for part in known for number in part.flat):
        return None
    return np.asarray(_ARITHMETIC[op.type](*known), object)


def _pack(op: Any, parts: list[np.ndarray]) -> np.ndarray:
    return np.stack(parts, axis=op.get_attr("axis"))


def _concat(op: Any, parts: list[np.ndarray]) -> np.ndarray | None:
    *parts, axis = parts
    return np.concatenate(parts) if axis == 0 and all(part.ndim == 1 for part in parts) else None


def _slice(op: Any, parts: list[np.ndarray]) -> np.ndarray | None:
    whole, begin, size = parts
    if whole.ndim != 1 or begin[0] is None or size[0] is None:
        return None
    return whole[begin[0] :] if size[0] == -1 else whole[begin[0] : begin[0] + size[0]]


def _strided_slice(op: Any, parts: list[np.ndarray]) -> np.ndarray | None:
    whole, begin, end, strides = parts
    if whole.ndim != 1 or len(begin) != 1 or op.get_attr("ellipsis_mask"):
        return None
    if None in (begin[0], end[0], strides[0]) or op.get_attr("new_axis_mask"):
        return None
    if op.get_attr("shrink_axis_mask"):
        return np.asarray(whole[begin[0]], object)
    first = None if op.get_attr("begin_mask") else begin[0]
    last = None if op.get_attr("end_mask") else end[0]
    return whole[first : last : strides[0]]


def _cast(op: Any, parts: list[np.ndarray]) -> np.ndarray | None:
    return parts[0] if op.inputs[0].dtype.is_integer and op.outputs[0].dtype.is_integer else None


_MADE_OF = {
    "Cast": _cast,
    "ConcatV2": _concat,
    "Identity": lambda op, parts: parts[0],
    "Pack": _pack,
    "Slice": _slice,
    "StridedSlice": _strided_slice,
}
