"""Whether the weights that a device gathers are kept for the backward pass, or gathered again."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax

from lockstep.engines.jax.steps.state_layout import ShardedVariable
from lockstep.state import bytes_of

GATHER_AGAIN = "LOCKSTEP_GATHER_AGAIN"
_KEPT_PART = 1 / 4
"""The part of a device's memory that gathered weights may take. A judgement, not a measurement."""
_ONE_BY_ONE = {
    "xla_gpu_all_gather_combine_threshold_bytes": "1",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "1",
}
"""Let XLA gather and reduce each array by itself. In one collective, all are there at once."""


def gathers_again(model: Any, devices: list[jax.Device]) -> bool:
    """Return whether a training step gathers weights again for its backward pass.

    It then sends half as much again, and a device need not have all weights at once.

    Args:
        model: The model.
        devices: The devices. The memory of the first one of this process decides, unless the user
            does. CPUs do not tell theirs.
    """
    chosen = os.environ.get(GATHER_AGAIN, "").strip()
    if chosen:
        return chosen != "0"
    here = next(each for each in devices if each.process_index == jax.process_index())
    memory = (here.memory_stats() or {}).get("bytes_limit")
    gathered = sum(bytes_of(variable) for variable in _sharded(model))
    return memory is not None and gathered > _KEPT_PART * memory


def compiler_options(model: Any, devices: list[jax.Device]) -> dict[str, str] | None:
    """Return the options with which XLA compiles a training step for these devices."""
    is_for_gpus = devices[0].platform == "gpu"
    return _ONE_BY_ONE if is_for_gpus and gathers_again(model, devices) else None


def gathering_again(model: Any, devices: list[jax.Device]) -> Callable[..., Any]:
    """Return the model's `compute_loss_and_updates`, of which a training step takes the gradient.

    Args:
        model: The model, with a shard of each large variable on each device.
        devices: The devices.
    """
    compute: Callable[..., Any] = model.compute_loss_and_updates

    @functools.wraps(compute)
    def compute_again(*args: Any, **kwargs: Any) -> Any:
        if not (kwargs.get("training") and gathers_again(model, devices)):
            return compute(*args, **kwargs)
        fixed = functools.partial(compute, training=kwargs.pop("training"))
        return jax.checkpoint(fixed, policy=_all_but(_sharded(model)))(*args, **kwargs)

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
