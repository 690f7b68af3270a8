"""The PyTorch engine: the loop in this process, each step on several processes."""

from contextlib import AbstractContextManager
from typing import Any

from lockstep.core.devices import Device
from lockstep.core.engine import Engine
from lockstep.core.environment import Place
from lockstep.core.layout import Branches, Layout
from lockstep.engines.torch import devices as torch_devices
from lockstep.engines.torch.branches.branch_session import BranchSession
from lockstep.engines.torch.first_step.verify_probe import TorchProbe
from lockstep.engines.torch.ranks.launcher_group import devices_of_all, join, joined
from lockstep.engines.torch.session import SplitSession, TorchSession
from lockstep.engines.torch.sharded.sharded_variables import made_on_host
from lockstep.engines.torch.sharded.to_shard import to_shard


class TorchEngine(Engine):
    """Runs Keras models on PyTorch devices; see `Engine` for the contract."""

    name = "torch"

    def devices(self) -> tuple[Device, ...]:
        """Return the devices of PyTorch, accelerators first; of joined processes one of each."""
        group = joined()
        return torch_devices.list_devices() if group is None else devices_of_all(group)

    def rehearse(self, devices: int) -> None:
        """Make `devices` virtual CPU devices and hide accelerators."""
        torch_devices.make_virtual(devices)

    def join(self, place: Place) -> tuple[int, int]:
        """Join the processes of a launcher, unless this has been done."""
        return join(place, torch_devices.rehearsed() or 1)

    def session(self, model: Any, layout: Layout) -> TorchSession:
        """Return a session of `model`; see `Engine`."""
        if isinstance(layout, Branches):
            return BranchSession(model, layout)
        return SplitSession(model, layout)

    def made_in_shards(self, devices: tuple[str, ...]) -> AbstractContextManager[None]:
        """Hold each large variable that is made inside the context on the host."""
        return made_on_host(len(devices))

    def sharded_dims(self, model: Any, devices: int) -> dict[int, int | None]:
        """Return 0 for each variable of which every device has a flat part, by `id`."""
        return {id(variable): 0 for variable in to_shard(model, devices)}

    def probe(self, model: Any) -> TorchProbe:
        """Return a probe for the steps of `model`, attached or not."""
        return TorchProbe(model)
