"""Bytes of one device in a training step: what it holds, and what it sends."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.devices import REPLICATED, SHARDED, shard_rows
from lockstep.keras_compat import autocasts, layers_in, stored_value
from lockstep.plan.abstract_model import Leaf
from lockstep.plan.memory_plan import LayoutBytes
from lockstep.state import GROUPS, bytes_of, item_bytes, named_variables


def layout_bytes(
    model: Any,
    batch: Sequence[Leaf],
    devices: int,
    dims: Mapping[int, int | None] | None,
    reduces_in_compute_type: bool,
) -> LayoutBytes:
    """Return the bytes of the device that holds and sends most.

    Args:
        model: A model that is built.
        batch: The arrays of a global batch.
        devices: The number of devices.
        dims: The dim along which each variable is sharded, by its `id`; `None` if the state is
            replicated.
        reduces_in_compute_type: See `Engine`.
    """
    sharded = {key for key, dim in (dims or {}).items() if dim is not None}
    held = dict.fromkeys(GROUPS, 0)
    named = {id(each): (name, each) for name, each in reversed(named_variables(model).items())}
    for key, (name, variable) in named.items():
        held[name.split("/")[0]] += size_of(variable) // (devices if key in sharded else 1)
    read = _sizes_as_read(model)
    reduced = scattered = 0
    for variable in model.trainable_variables:
        size = size_of(variable)
        as_read = read.get(id(variable), size) if reduces_in_compute_type else size
        if id(variable) in sharded:
            scattered += as_read
        else:
            reduced += as_read
    gathered = sum(size for key, size in read.items() if key in sharded)
    return LayoutBytes(
        devices=devices,
        state=REPLICATED if dims is None else SHARDED,
        weights=held["trainable"] + held["non_trainable"],
        optimizer=held["optimizer"],
        gradients=held["trainable"],
        metrics=held["metrics"],
        batch=sum(_most(shape, devices) * each for shape, each in batch),
        gathered=gathered,
        all_reduce=2 * _part_in_ring(reduced, devices),
        all_gather=_part_in_ring(gathered, devices),
        reduce_scatter=_part_in_ring(scattered, devices),
    )


def size_of(variable: Any) -> int:
    """Return the bytes of a variable as the backend stores it."""
    # PyTorch has no unsigned integers of 16 and 32 bits, and Keras takes longer ones.
    size = getattr(stored_value(variable), "nbytes", None)
    return bytes_of(variable) if size is None else int(size)


def _sizes_as_read(model: Any) -> dict[int, int]:
    """Return the bytes of each weight in the type in which its layer reads it, by its `id`."""
    sizes: dict[int, int] = {}
    for layer in layers_in(model):  # an inner layer comes after the layer around it
        for variable in layer.variables:
            is_cast = autocasts(variable) and "float" in variable.dtype
            dtype = layer.compute_dtype if is_cast else variable.dtype
            sizes[id(variable)] = math.prod(variable.shape) * item_bytes(dtype)
    return sizes


def _most(shape: tuple[int, ...], devices: int) -> int:
    """Return the elements of an array of a batch on the device with the most rows."""
    if not shape:
        return 1
    return len(shard_rows(shape[0], devices)[0]) * math.prod(shape[1:])


def _part_in_ring(size: int, devices: int) -> int:
    """Return the bytes that a device sends, in a ring, of an array that is gathered or reduced."""
    return -(-size * (devices - 1) // devices)
