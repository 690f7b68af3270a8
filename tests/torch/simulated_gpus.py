"""Several devices that PyTorch can tell apart, on a machine without any.

A tensor of such a device computes on the CPU, and says that it is elsewhere. An operation refuses
tensors of two devices, as PyTorch does with GPUs. The kind of device is "lazy", which PyTorch
has no kernels for, and which its autograd engine serves in the calling thread.
"""

from contextlib import contextmanager

import keras
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.core.devices import Device

CPU = torch.device("cpu")
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


@contextmanager
def simulated_gpus(count=3):
    """Give lockstep and Keras so many GPUs inside the context. Yield the simulation.

    Its `operations` count what has run on each device.
    """
    from lockstep.engines.torch import devices
    from lockstep.engines.torch.branches import branch_session
    from lockstep.keras_compat.calls import _torch_core

    found = tuple(Device(f"gpu:{number}", "simulated") for number in range(count))
    core, generator = _torch_core(), torch.Generator
    keras.utils.clear_session(free_memory=False)  # its random seeds are elsewhere
    with pytest.MonkeyPatch.context() as patch, Simulation() as simulation:
        patch.setattr(devices, "list_devices", lambda: found)
        patch.setattr(branch_session, "torch_device_of", _device_of)
        patch.setattr(core, "DEFAULT_DEVICE", "lazy:0")
        patch.setattr(core, "_parse_device_input", lambda name: name.replace("gpu", "lazy"))
        patch.setattr(torch, "Generator", lambda device=None: generator())
        yield simulation
    keras.utils.clear_session(free_memory=False)


def _device_of(name):
    kind, _, number = name.partition(":")
    return torch.device("lazy", int(number)) if kind == "gpu" else torch.device(kind)


class Simulation(TorchDispatchMode):
    """Runs the operations of simulated devices."""

    def __init__(self):
        super().__init__()
        self.operations = {}

    def __enter__(self):
        # As in torch/_subclasses/fake_tensor.py: `torch.tensor` makes its tensors on the CPU first.
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(self._before)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = _device(func, args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        there = self.operations.setdefault(str(device), {})
        there[name] = there.get(name, 0) + 1
        results = func(*tree_map(_real, args), **tree_map(_real, kwargs))
        if name.endswith("_") and isinstance(args[0], torch.Tensor):
            return args[0]
        return tree_map(lambda result: _elsewhere(result, device), results)


class Elsewhere(torch.Tensor):
    """A tensor of a simulated device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real, device):
        form = {"strides": real.stride(), "storage_offset": real.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(
            cls, real.size(), **form, dtype=real.dtype, device=device
        )
        made.held = real
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of the simulation")

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        self.held = value.held


def _device(func, args, kwargs):
    """The device of an operation; raise if its tensors are on several ones."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    if func in COPIES:
        return args[0].device
    lists = [each for each in args if isinstance(each, list | tuple)]
    if func._schema.name.startswith("aten::_foreach") and isinstance(lists[0][0], torch.Tensor):
        alone = [each for each in args if isinstance(each, torch.Tensor)]
        every = [_common(func, [*each, *alone]) for each in zip(*lists, strict=True)]
        return every[0]
    return _common(func, tree_leaves((args, kwargs)))


def _common(func, leaves):
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    # PyTorch takes numbers of the CPU, which are tensors without dimensions, on any device.
    devices = {t.device for t in tensors if t.ndim or t.device != CPU} or {CPU}
    if len(devices) > 1:
        raise RuntimeError(f"{func} has tensors of {sorted(map(str, devices))}")
    return devices.pop()


def _real(leaf):
    if isinstance(leaf, torch.device):
        return CPU if leaf.type == "lazy" else leaf
    return leaf.held if isinstance(leaf, Elsewhere) else leaf


def _elsewhere(leaf, device):
    is_there = isinstance(leaf, torch.Tensor) and device.type == "lazy"
    return Elsewhere(leaf, device) if is_there else leaf
