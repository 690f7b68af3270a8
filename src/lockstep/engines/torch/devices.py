"""PyTorch's devices, and virtual CPU devices, which are processes."""

import os
from typing import Any

import torch

from lockstep.core.devices import Device, check_visible, rehearsed_devices
from lockstep.core.rehearsal_error import rehearsal_too_late
from lockstep.core.shared_gpu import check_one_gpu, shares_of_gpu
from lockstep.engines.torch.exchange.accelerators import is_gpu, listed, summed
from lockstep.engines.torch.exchange.placement import keras_uses_gpus, torch_device_of

_rehearsed: int | None = None


def list_devices() -> tuple[Device, ...]:
    """Return the devices of PyTorch, accelerators first.

    PyTorch has one CPU device. In a rehearsal there are more: each is a process.

    Raises:
        RehearsalTooLate: If a rehearsal is requested after Keras has chosen an accelerator.
        DeviceError: If `CUDA_VISIBLE_DEVICES` was set too late, or one GPU is to be shared and
            another number is here.
    """
    asked = rehearsed_devices(os.environ)
    if asked:
        make_virtual(asked)
    if _rehearsed is not None:
        return tuple(Device(f"cpu:{number}", "cpu") for number in range(_rehearsed))
    gpus = listed() if keras_uses_gpus() else ()
    shares = shares_of_gpu(os.environ)
    if shares is not None and not gpus:
        check_one_gpu(shares, 0)
    here = (*gpus, Device("cpu:0", "cpu"))
    check_visible(here if shares is None else gpus[:1], os.environ)
    return here


def rehearsed() -> int | None:
    """Return the number of virtual devices of this process, `None` without a rehearsal."""
    asked = rehearsed_devices(os.environ)
    return asked or _rehearsed


def make_virtual(count: int) -> None:
    """Make `count` virtual CPU devices and hide accelerators.

    Raises:
        RehearsalTooLate: If Keras has chosen an accelerator.
    """
    global _rehearsed
    if keras_uses_gpus():
        raise rehearsal_too_late("Keras", count, (*listed(), Device("cpu:0", "cpu")))
    _rehearsed = count


def exchanged(values: Any, source: str, target: str) -> tuple[Any, Any]:
    """Copy integers from one device to another, and sum them over both; see `doctor.CopyAndSum`.

    The sum is computed in this process. NCCL between the processes of a pool is not tried.
    """
    one, other = torch_device_of(source), torch_device_of(target)
    given, there = torch.from_numpy(values).to(one), torch.from_numpy(values).to(other)
    total = summed([given, there], other) if is_gpu(other) else given + there
    return given.to(other).cpu().numpy(), total.cpu().numpy()
