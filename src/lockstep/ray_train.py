"""Reads the rank of this worker, and the number of workers, from Ray Train.

Ray Train sets no variables. Ray is imported here alone, and only in a process that has Ray Train.
"""

import functools
import os
import sys
from dataclasses import replace
from typing import Any

from lockstep.core.environment import Place
from lockstep.errors import ProcessesDisagree
from lockstep.processes.shares import free_address

_OLDEST = (2, 51)
"""The first release whose `ray.train` has the context and the collectives that are read."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def worker_place() -> Place | None:
    """Return the place of this worker of Ray Train, without an address; `None` elsewhere.

    Raises:
        ProcessesDisagree: If Ray is too old, or this worker sees GPUs of another one.
    """
    if "ray.train" not in sys.modules:
        return None
    import ray
    from ray import train

    try:
        context = train.get_context()
        size = context.get_world_size()
    except (RuntimeError, DeprecationWarning):  # of a driver, and of a function of Ray Tune
        return None
    if size is None:  # Ray before 2.51, outside of a worker
        return None
    if tuple(map(int, ray.__version__.split(".")[:2])) < _OLDEST:
        raise ProcessesDisagree(
            f"Ray {ray.__version__} has started this process, but lockstep needs\n"
            f"Ray {'.'.join(map(str, _OLDEST))} or later. Upgrade it on every node: pip install "
            "-U 'ray[train]'."
        )
    place = Place(
        context.get_world_rank(),
        size,
        context.get_local_rank(),
        context.get_local_world_size(),
        launcher="Ray Train",
        variables=("ray.train.get_context()",),
        trains_together=False,  # the address is known after a call that all workers make
    )
    return replace(place, divides_devices=_has_own_gpus(place, ray.get_runtime_context()))


@functools.cache
def with_address(place: Place) -> Place:
    """Return the place with the address where all workers meet. All workers make this call."""
    if place.size == 1:
        return place
    import ray
    from ray.train.collective import broadcast_from_rank_zero

    address = broadcast_from_rank_zero(free_address(ray.util.get_node_ip_address()))
    return replace(place, coordinator=address)


def _has_own_gpus(place: Place, context: Any) -> bool:
    """Return whether this worker sees its own GPUs alone, and not those of all on this host.

    Raises:
        ProcessesDisagree: If two workers would take the same GPU.
    """
    assigned = context.get_accelerator_ids().get("GPU", [])
    if not assigned or place.size == 1:
        return True
    share = context.get_assigned_resources().get("GPU", len(assigned))
    if share < len(assigned):
        raise ProcessesDisagree(
            f"This is {place}, and Ray has assigned {share} of GPU {assigned[0]} to it: two "
            "workers would train on one GPU.\n"
            'Give each worker a whole GPU: ScalingConfig(resources_per_worker={"GPU": 1}).'
        )
    seen = os.environ.get(_VISIBLE, "").split(",")
    if sorted(seen) == sorted(assigned):
        return True
    if len(seen) == len(assigned) * (place.local_size or 1) and {*assigned} <= {*seen}:
        return False  # TorchTrainer shows all workers of a node all of their GPUs
    raise ProcessesDisagree(
        f"This is {place}. It sees the GPUs {','.join(seen)} ({_VISIBLE}), but Ray has assigned "
        f"{','.join(assigned)}\nto it: another worker may train on the same GPUs. Use "
        "DataParallelTrainer, or JaxTrainer with jax_config=JaxConfig()."
    )
