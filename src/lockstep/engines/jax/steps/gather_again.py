"""Whether the weights that a device gathers are kept for the backward pass, or gathered again."""

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lockstep.core.state import bytes_of
from lockstep.engines.jax.processes.jax_group import GROUP
from lockstep.engines.jax.steps.state_layout import ShardedVariable
from lockstep.keras_compat import get_keras_mask, set_keras_mask

GATHER_AGAIN = "LOCKSTEP_GATHER_AGAIN"
_KEPT_PART = 1 / 4
"""The part of a device's memory that gathered weights may take. A judgement, not a measurement."""
_TAKEN_PART = 3 / 4
"""The part of a GPU's memory that JAX takes by default: the `bytes_limit` of its devices."""
ONE_BY_ONE = {
    "xla_gpu_all_gather_combine_threshold_bytes": "1",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "1",
}
"""Let XLA gather and reduce each array by itself. In one collective, all are there at once."""


def room_for_gathered(devices: list[jax.Device]) -> float:
    """Return the bytes of gathered weights that a training step may keep for its backward pass.

    The first process decides for all of them: they must run one program.

    Args:
        devices: The devices. The memory of the first one of this process counts. CPUs do not tell
            theirs.
    """
    here = next(each for each in devices if each.process_index == jax.process_index())
    room = _room((here.memory_stats() or {}).get("bytes_limit", math.inf))
    return float(GROUP.broadcast([np.asarray(room)])[0]) if GROUP.size > 1 else room


def _room(memory: float) -> float:
    chosen = os.environ.get(GATHER_AGAIN, "").strip()
    return (math.inf if chosen == "0" else 0.0) if chosen else _KEPT_PART * memory


def would_gather_again(size: int, memory: float) -> bool:
    """Return whether a training step on devices that are not here gathers weights again.

    Args:
        size: The bytes of all sharded weights.
        memory: The bytes of a device. JAX takes a part of those of a GPU.
    """
    return size > _room(_TAKEN_PART * memory)


def gathers_again(model: Any, room: float) -> bool:
    """Return whether a training step gathers weights again for its backward pass.

    It then sends half as much again, and a device need not have all weights at once.
    """
    return sum(bytes_of(variable) for variable in _sharded(model)) > room


def compiler_options(model: Any, devices: list[jax.Device], room: float) -> dict[str, str] | None:
    """Return the options with which XLA compiles a training step for these devices."""
    is_for_gpus = devices[0].platform == "gpu"
    return ONE_BY_ONE if is_for_gpus and gathers_again(model, room) else None


def gathering_again(model: Any, room: float) -> Callable[..., Any]:
    """Return the model's `compute_loss_and_updates`, of which a training step takes the gradient.

    Args:
        model: The model, with a shard of each large variable on each device.
        room: The bytes of gathered weights that a step may keep.
    """
    compute: Callable[..., Any] = model.compute_loss_and_updates

    @functools.wraps(compute)
    def compute_again(*args: Any, **kwargs: Any) -> Any:
        if not (kwargs.get("training") and gathers_again(model, room)):
            return compute(*args, **kwargs)
        fixed = functools.partial(compute, training=kwargs.pop("training"))

        def with_masks(*args: Any, **kwargs: Any) -> Any:
            found = fixed(*args, **kwargs)
            return found, [get_keras_mask(each) for each in jax.tree.leaves(found)]

        again = jax.checkpoint(with_masks, policy=_all_but(_sharded(model)))
        found, masks = again(*args, **kwargs)
        for each, mask in zip(jax.tree.leaves(found), masks, strict=True):
            if mask is not None:  # JAX returns other tensors, without the masks of Keras
                set_keras_mask(each, mask)
        return found

    return compute_again


def _sharded(model: Any) -> list[Any]:
    return [variable for variable in model.variables if isinstance(variable, ShardedVariable)]


def _all_but(variables: list[Any]) -> Callable[..., bool]:
    """Return whether the result of an operation is kept for the backward pass.

    What has the shape of one of the variables is computed again: it may be a gathered weight, or
    what a layer makes of one, such as the sum of LoRA. A policy by names would keep the weight, as
    the operand of its name. An activation of that shape is computed again too, to the same values.
    """
    shapes = {tuple(sorted(variable.shape)) for variable in variables}

    def keeps(primitive: Any, *inputs: Any, **parameters: Any) -> bool:
        try:
            results, _ = primitive.abstract_eval(*inputs, **parameters)
        except NotImplementedError:  # a function with a gradient of its own, such as relu
            return True
        every = results if primitive.multiple_results else [results]
        return not any(tuple(sorted(getattr(each, "shape", ()))) in shapes for each in every)

    return keeps
