"""A PyTorch process joins the others that a launcher has started."""

from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.engines.torch.placement import make_current
from lockstep.engines.torch.torch_group import TorchGroup, join_group, joined
from lockstep.errors import ProcessesDisagree
from lockstep.keras_compat import torch_default_device
from lockstep.launch.environment import Place
from lockstep.launch.shares import announce_coordinator, devices_of_process, not_met
from lockstep.launch.status import phase
from lockstep.processes.coordination import patience

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def join(place: Place, rehearsed: int) -> tuple[int, int]:
    """Join the other processes, unless this has been done; return the rank and the size.

    Args:
        place: The place of this process.
        rehearsed: The number of virtual devices of this process.

    Raises:
        ProcessesDisagree: If the processes do not find each other, or one has several devices.
    """
    group = joined()
    if group is None and place.size > 1:
        device = _own_device(place, rehearsed)
        make_current(device)
        host, _, port = (place.coordinator or "").rpartition(":")
        host = host.strip("[]")
        if place.rank == 0:
            announce_coordinator(place)
        most = timedelta(seconds=patience())
        try:
            with phase("joining", compiles=True):
                store = dist.TCPStore(host, int(port), place.size, place.rank == 0, most)
        except dist.DistError as error:
            raise not_met(place, error) from error
        group = TorchGroup(store, place.rank, place.size, device, local=host in _LOOPBACK)
        join_group(group)
    return (place.rank, place.size) if group is None else (group.rank, group.size)


def _own_device(place: Place, rehearsed: int) -> torch.device:
    """Return the one device on which this process trains."""
    if torch_default_device() == "cpu":
        mine = list(range(rehearsed))
    else:
        visible = torch.cuda.device_count()
        found = devices_of_process(place, visible)
        mine = list(range(visible)) if found is None else found
    if len(mine) != 1:
        raise ProcessesDisagree(
            f"This is {place}, and it has {len(mine)} devices; on 'torch' each process trains on "
            f"one.\nStart {place.size * len(mine)} processes, or let each see one device "
            "(CUDA_VISIBLE_DEVICES, LOCKSTEP_REHEARSE=1)."
        )
    kind = "cpu" if torch_default_device() == "cpu" else "cuda"
    return torch.device(kind, mine[0]) if kind == "cuda" else torch.device(kind)
