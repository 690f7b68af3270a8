"""Bytes of one device in a training step: what it holds, and what it sends."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from lockstep.core.devices import REPLICATED, SHARDED, shard_rows
from lockstep.core.state import GROUPS, bytes_of, item_bytes, named_variables
from lockstep.keras_compat import autocasts, layers_in, stored_value

UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}

Leaf = tuple[tuple[int, ...], int]
"""The shape of an array of a batch, and the bytes of one element."""


@dataclass(frozen=True)
class LayoutBytes:
    """What a device holds and sends in a training step, in bytes.

    What it holds is that of the fullest device. What it sends is that of a ring: for an array of B
    bytes on N devices, a device sends 2 B (N - 1) / N in an all-reduce, and half of it in an
    all-gather or a reduce-scatter.

    Attributes:
        devices: The number of devices.
        state: `"replicated"` or `"sharded"`.
        weights: All variables of the layers, those that are not trained included.
        optimizer: The optimizer slots and counters.
        gradients: The gradients that the optimizer takes.
        metrics: The state of metrics.
        batch: The rows of the device with the most rows.
        gathered: Sharded weights as their layers read them, which are among the temporaries.
        all_reduce: Sent in each step, of the gradients of weights that are not sharded.
        all_gather: Sent in each step, of sharded weights.
        reduce_scatter: Sent in each step, of the gradients of sharded weights.
        temporaries: About the activations, gradients and other temporaries that are in memory
            together; `None` if they are not known.
        largest_batch: Rows of the largest global batch that fits, 0 if none does; `None` if not
            asked for.
        largest_micro_batch: The largest `micro_batch_size` that fits, 0 if none does; `None` if it
            is not needed or not known.
        micro_batch_peak: About the peak with that size; `None` without one.
        gathers_again: Whether a step gathers sharded weights again for its backward pass, because
            they would take too much of the memory.
        policy: The dtype policy under which the model was made, empty for that of the script.
    """

    devices: int
    state: str
    weights: int
    optimizer: int
    gradients: int
    metrics: int
    batch: int
    gathered: int
    all_reduce: int
    all_gather: int
    reduce_scatter: int
    temporaries: int | None = None
    largest_batch: int | None = None
    largest_micro_batch: int | None = None
    micro_batch_peak: int | None = None
    gathers_again: bool = False
    policy: str = ""

    @property
    def name(self) -> str:
        """The number of devices and the layout, for a table."""
        return f"{self.devices} {self.state}{', ' * bool(self.policy)}{self.policy}"

    @property
    def held(self) -> int:
        """The bytes that a device holds, without activations and temporaries."""
        return self.weights + self.optimizer + self.gradients + self.metrics + self.batch

    @property
    def peak(self) -> int | None:
        """About the bytes that a device holds at the peak of a step; `None` if not known."""
        if self.temporaries is None:
            return None
        return self.held - self.gradients + self.temporaries

    @property
    def sent(self) -> int:
        """The bytes that a device sends in each step."""
        return self.all_reduce + self.all_gather + self.reduce_scatter


def amount(size: int) -> str:
    """Return a number of bytes in words.

    Example:
        >>> amount(311352), amount(24_000_000_000), amount(96)
        ('311 kB', '24.0 GB', '96 B')
    """
    for unit, factor in reversed(UNITS.items()):
        if size >= factor:
            value = size / factor
            digits = max(0, 2 - (len(str(int(value))) - 1))
            return f"{value:,.{digits}f} {unit}"
    return f"{size} B"


def layout_bytes(
    model: Any,
    batch: Sequence[Leaf],
    devices: int,
    dims: Mapping[int, int | None] | None,
    gathers_again: Callable[[int], bool] = lambda size: False,
) -> LayoutBytes:
    """Return the bytes of the device that holds and sends most.

    Args:
        model: A model that is built.
        batch: The arrays of a global batch.
        devices: The number of devices.
        dims: The dim along which each variable is sharded, by its `id`; `None` if the state is
            replicated.
        gathers_again: Returns whether sharded weights of so many bytes are gathered again.
    """
    sharded = {key for key, dim in (dims or {}).items() if dim is not None}
    held = dict.fromkeys(GROUPS, 0)
    named = {id(each): (name, each) for name, each in reversed(named_variables(model).items())}
    for key, (name, variable) in named.items():
        size = size_of(variable)
        if key in sharded:  # a shard has as many elements as the largest one
            item = item_bytes(variable.dtype)
            size = -(-size // (item * devices)) * item
        held[name.split("/")[0]] += size
    read = _sizes_as_read(model)
    # JAX sums gradients before they get the type of their variable.
    reduces_as_read = keras.backend.backend() == "jax"
    reduced = scattered = 0
    for variable in model.trainable_variables:
        size = size_of(variable)
        as_read = read.get(id(variable), size) if reduces_as_read else size
        if id(variable) in sharded:
            scattered += as_read
        else:
            reduced += as_read
    gathered = sum(size for key, size in read.items() if key in sharded)
    again = gathers_again(sum(bytes_of(each) for each in model.variables if id(each) in sharded))
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
        all_gather=_part_in_ring(gathered, devices) * (2 if again else 1),
        reduce_scatter=_part_in_ring(scattered, devices),
        gathers_again=again,
    )


def size_of(variable: Any) -> int:
    """Return the bytes of a variable as the backend stores it."""
    # PyTorch has no unsigned integers of 16 and 32 bits, and Keras takes longer ones.
    value = stored_value(variable)
    is_whole = tuple(getattr(value, "shape", ())) == tuple(variable.shape)
    size = getattr(value, "nbytes", None) if is_whole else None
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
