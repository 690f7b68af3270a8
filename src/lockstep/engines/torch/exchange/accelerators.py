"""The GPUs of PyTorch: all that the engine asks of `torch.cuda`.

The tests replace `cuda` and `KIND`, so that CPU devices stand for GPUs. Keras is not imported here:
`import lockstep` needs this module under a launcher.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel.comm import reduce_add

from lockstep.core.devices import REHEARSE, Device
from lockstep.core.environment import Place
from lockstep.core.shared_gpu import check_one_gpu, let_ranks_share, shares_of_gpu
from lockstep.errors import ProcessesDisagree, UnsupportedBackend
from lockstep.processes.shares import devices_of_process

KIND = "cuda"
"""What PyTorch calls the kind of device that is `"gpu"` in lockstep."""

cuda: Any = torch.cuda


def is_gpu(device: torch.device) -> bool:
    """Return whether a device of PyTorch is a GPU."""
    return bool(device.type == KIND)


def device_of(number: int) -> torch.device:
    """Return PyTorch's device for the number of a GPU, or of a share of the one GPU."""
    return torch.device(KIND, 0 if shares_of_gpu(os.environ) else number)


def number_of_gpus() -> int:
    """Return the number of GPUs that this process sees."""
    return int(cuda.device_count())


def listed() -> list[Device]:
    """Return the GPUs that this process sees, or the shares of the one GPU.

    Raises:
        DeviceError: If one GPU is to be shared, and several are here.
    """
    shares = shares_of_gpu(os.environ)
    every = list(map(cuda.get_device_properties, range(number_of_gpus())))
    if shares is not None:
        check_one_gpu(shares, len(every))
        (gpu,) = every
        kind, memory = f"{gpu.name}, shared", gpu.total_memory // shares
        return [Device(f"gpu:{n}", kind, memory) for n in range(shares)]
    return [Device(f"gpu:{n}", each.name, each.total_memory) for n, each in enumerate(every)]


def name_of(device: torch.device) -> str:
    """Return what the maker calls a GPU."""
    return str(cuda.get_device_name(device))


def current_number() -> int:
    """Return the number of PyTorch's current GPU."""
    return int(cuda.current_device())


def make_current(device: torch.device) -> None:
    """Let Keras make its tensors on this device, in this process."""
    if is_gpu(device):
        cuda.set_device(device)


def limit_memory(device: torch.device) -> None:
    """Let this process take its part of the memory of a GPU that is shared, and no more."""
    shares = shares_of_gpu(os.environ)
    if is_gpu(device) and shares is not None:
        cuda.set_per_process_memory_fraction(1 / shares, device)


def take_own(place: Place, environ: Mapping[str, str]) -> None:
    """Make the GPU of a launcher's process PyTorch's current one, if it sees those of others too.

    A script may build its model before it calls `distribute`. Every process of the host would build
    it on the first GPU. What cannot be divided is refused by `distribute`.

    Args:
        place: The place of this process.
        environ: The environment.
    """
    on_cpu = environ.get(REHEARSE, "").strip() or environ.get("KERAS_TORCH_DEVICE", KIND) != KIND
    if on_cpu or not cuda.is_available() or current_number():  # the script has chosen another one
        return
    try:
        mine = devices_of_process(place, number_of_gpus())
    except ProcessesDisagree:
        return
    if mine is not None and len(mine) == 1:
        cuda.set_device(mine[0])


def wait_for(device: torch.device) -> None:
    """Wait for what this process has started on its GPU."""
    if is_gpu(device):
        cuda.current_stream().synchronize()


def free_cache(device: torch.device) -> None:
    """Give memory back to a GPU that no tensor has."""
    if is_gpu(device):
        cuda.empty_cache()


def summed(tensors: list[Any], device: torch.device) -> Any:
    """Return the sum of tensors of several GPUs on one of them, by NCCL where PyTorch has it."""
    return reduce_add(tensors, destination=device.index)


def exchanges_by_nccl(device: torch.device) -> bool:
    """Return whether NCCL connects the ranks, and not gloo over the memory of the host.

    `check_nccl` allows GPUs without NCCL only where ranks share one.
    """
    return is_gpu(device) and bool(dist.is_nccl_available())


def check_nccl() -> None:
    """Raise if this PyTorch cannot exchange tensors of several GPUs, or of shares of one.

    Raises:
        UnsupportedBackend: If it was built without NCCL, as on Windows, or a GPU is to be shared,
            and NCCL is too old.
    """
    if shares_of_gpu(os.environ) is not None:
        if dist.is_nccl_available():
            let_ranks_share(os.environ, cuda.nccl.version())
        return
    if not dist.is_nccl_available():
        raise UnsupportedBackend(
            f"Several GPUs were requested on 'torch', but PyTorch {torch.__version__} has no "
            "NCCL to exchange gradients.\n"
            "Install a CUDA build of PyTorch on Linux, or train on one GPU: devices=1."
        )
