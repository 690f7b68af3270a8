"""The PyTorch device of a rank, and copies of tensors: on that device, or to restore them.

Keras makes its tensors on PyTorch's current device. So each process has one current device.
"""

from collections.abc import Sequence
from typing import Any

import keras
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.core.state import variables_of
from lockstep.engines.torch.exchange import accelerators
from lockstep.engines.torch.exchange.accelerators import (
    check_nccl,
    current_number,
    device_of,
    is_gpu,
)
from lockstep.errors import DeviceError, UnsupportedBackend
from lockstep.keras_compat import stored_value, torch_current_device, torch_default_device


def torch_device_of(name: str) -> torch.device:
    """Return PyTorch's device for a name of lockstep.

    Virtual CPU devices are processes, each on the one CPU device of PyTorch.

    Example:
        >>> torch_device_of("gpu:1"), torch_device_of("cpu:1")
        (device(type='cuda', index=1), device(type='cpu'))
    """
    platform, _, number = name.partition(":")
    return device_of(int(number)) if platform == "gpu" else torch.device(platform)


def current_device() -> torch.device:
    """Return the device on which Keras makes its tensors now."""
    device = torch.device(torch_current_device())
    return device_of(current_number()) if is_gpu(device) and device.index is None else device


def computes() -> bool:
    """Return whether calls compute now: Keras also calls layers to learn shapes alone."""
    return torch_current_device() != "meta"


def keras_uses_gpus() -> bool:
    """Return whether Keras has chosen a GPU for its tensors.

    Raises:
        UnsupportedBackend: If it has chosen a device that lockstep does not know.
    """
    kind = torch_default_device().partition(":")[0]
    if kind not in ("cpu", accelerators.KIND):
        raise UnsupportedBackend(
            f"Keras creates its tensors on {kind!r}, but on 'torch' lockstep supports only "
            "'cuda' and 'cpu'.\n"
            "PyTorch has no suitable collectives for other kinds of devices.\n"
            "Set KERAS_TORCH_DEVICE=cpu before Keras is imported, or do not use lockstep."
        )
    return kind == accelerators.KIND


def check_placement(devices: Sequence[str]) -> None:
    """Check that each rank can compute on its device, this process on the first one.

    Raises:
        DeviceError: If the devices are of several kinds, or the first one is not that on which
            Keras makes its tensors.
    """
    kinds = {name.partition(":")[0] for name in devices}
    if len(kinds) > 1:
        raise DeviceError(
            f"devices={', '.join(devices)} was requested on 'torch', but these are devices of "
            "different kinds.\nName only GPUs, or only CPU devices."
        )
    if kinds != {"gpu"}:
        return
    if len(devices) > 1:
        check_nccl()
    current = current_number()
    first = int(devices[0].partition(":")[2])
    if first != current:
        raise DeviceError(
            f"devices={', '.join(devices)} was requested on 'torch', but Keras creates its "
            f"tensors on gpu:{current}.\nName this GPU first, or call "
            f"torch.cuda.set_device({first}) before the model is built."
        )


def move_model(model: Any, device: torch.device) -> None:
    """Move the variables of a model, in place: their tensors stay the same objects."""
    for variable in variables_of(model):
        tensor = stored_value(variable)
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def copies_on(device: torch.device, tensors: Any) -> Any:
    """Return copies of the tensors of a nest on a device, `None` for `None`."""
    return keras.tree.map_structure(
        lambda tensor: None if tensor is None else tensor.to(device, copy=True), tensors
    )


def copies(nest: Any) -> Any:
    """Copy the tensors of a batch, or of logs: a metric may return that of its variable."""
    return keras.tree.map_structure(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, nest
    )


def with_rows(tensor: Any, rows: int) -> Any:
    """Return a new tensor of so many rows that lies in memory as another one does.

    Random numbers are drawn in that order: the outputs of an RNN, say, lie step by step. A dim of
    one row may have the stride of the dim that is next inside.
    """
    order = sorted(range(tensor.ndim), key=lambda n: (-tensor.stride(n), -tensor.shape[n]))
    shape = (rows, *tensor.shape[1:])
    return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)


def flattened(tensor: Any) -> Any:
    """Return the values of a tensor in one row, which can be viewed as bytes.

    A tensor of one value counts as contiguous with any stride, and PyTorch views no such one.
    """
    flat = tensor.detach().contiguous()
    return flat.as_strided((flat.numel(),), (1,))


def version_of(tensor: Any) -> Any:
    """Return what is another one once code has written into a tensor, or assigned to its `data`.

    PyTorch counts no writes to an inference tensor, and no assignments to `data`.
    """
    count = 0 if tensor.is_inference() else tensor._version
    if tensor.layout != torch.strided:
        return count
    # A weak reference keeps the number of a storage from being that of another one.
    storage = StorageWeakRef(tensor.untyped_storage())
    return count, storage, tensor.storage_offset(), tensor.shape, tensor.stride()


class Undo:
    """Restores the tensors that a step changed, after a trial, an interruption or a failure.

    Args:
        tensors: The tensors.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = tensors
        self._saved: dict[int, tuple[Any, Any]] = {}

    def save(self) -> None:
        """Copy the values that have changed since the last copy."""
        for tensor in self._tensors:
            saved, version = self._saved.get(id(tensor)), version_of(tensor)
            if saved is None or saved[0] != version:
                self._saved[id(tensor)] = version, tensor.detach().clone()

    def put_back(self) -> None:
        """Put back the values of the last `save`."""
        with torch.no_grad():
            for tensor in self._tensors:
                _, value = self._saved[id(tensor)]
                if not _is_same(tensor, value):  # batch norm of PyTorch counts no version
                    tensor.copy_(value)


def _is_same(tensor: Any, value: Any) -> bool:
    """Return whether two tensors have the same values; NaN equals NaN here."""
    if torch.equal(tensor, value):
        return True
    return bool(
        tensor.is_floating_point() and torch.allclose(tensor, value, 0.0, 0.0, equal_nan=True)
    )


def empty_parameter(variable: Any) -> Any:
    """Return a parameter without memory for a variable: Keras registers it with the layer."""
    with keras.device("meta"):
        value = keras.ops.zeros(variable.shape, variable.dtype)
    return torch.nn.Parameter(value, requires_grad=variable.trainable)
