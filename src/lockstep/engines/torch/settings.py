"""What the processes of a pool have in common besides a model, and how they compare values."""

import math
import zlib
from typing import Any

import keras
import torch

from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import (
    compute_in_float64,
    computes_in_float64,
    names_mean_float64,
    stored_value,
)

Settings = dict[str, Any]

_KINDS = ("cpu", "cuda")


def current_settings() -> Settings:
    """Return the settings of Keras and PyTorch that change results."""
    return {
        "float64": computes_in_float64(),
        "names_mean_float64": names_mean_float64(),
        "floatx": keras.config.floatx(),
        "epsilon": keras.config.epsilon(),
        "image_data_format": keras.config.image_data_format(),
        "dtype_policy": keras.config.dtype_policy().get_config(),
        "default_dtype": torch.get_default_dtype(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "autocast": {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _KINDS
        },
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "flash_attention": keras.config.is_flash_attention_enabled(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
    }


def apply_settings(settings: Settings) -> None:
    """Set what `current_settings` returned in another process."""
    if settings["float64"]:
        compute_in_float64(whatever_is_asked=settings["names_mean_float64"])
    keras.config.set_floatx(settings["floatx"])
    keras.config.set_epsilon(settings["epsilon"])
    keras.config.set_image_data_format(settings["image_data_format"])
    policy = keras.dtype_policies.DTypePolicy.from_config(settings["dtype_policy"])
    keras.config.set_dtype_policy(policy)
    torch.set_default_dtype(settings["default_dtype"])
    torch.set_float32_matmul_precision(settings["matmul_precision"])
    deterministic, warn_only = settings["deterministic"]
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    for kind, (enabled, dtype) in settings["autocast"].items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(settings["autocast_cache"])
    torch.clear_autocast_cache()
    if settings["flash_attention"] is False:
        keras.config.disable_flash_attention()
    elif settings["flash_attention"]:
        keras.config.enable_flash_attention()
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = settings["tf32"]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = settings["cudnn"]


class AutocastCheck:
    """Refuses steps for which `torch.autocast` keeps casts of weights that have changed since.

    It keeps them until its context ends. So one device, too, computes with old weights there.

    Args:
        model: The model.
        device: The device of the weights.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._marker: Any = None
        self._versions: dict[int, int] = {}

    def check(self, *, several_updates: bool = False) -> None:
        """Raise if a step would compute with such casts.

        Args:
            several_updates: Whether weights change before the last step of the call.

        Raises:
            UnsupportedModel: If it would.
        """
        enabled = torch.is_autocast_enabled(self._device.type)
        if not (enabled and torch.is_autocast_cache_enabled()):
            return
        tensors = [stored_value(weight) for weight in self._model.trainable_variables]
        versions = {id(each): each._version for each in tensors if each is not None}
        if self._is_another_context():
            self._versions = versions
        known = self._versions
        if several_updates or any(known.get(each, now) != now for each, now in versions.items()):
            raise UnsupportedModel(
                f"torch.autocast is around steps of {self._model.name!r}, and computes with the "
                "weights from before\nthe first update until its context ends, on one device too. "
                "Give it cache_enabled=False,\nor make the model under "
                'keras.config.set_dtype_policy("mixed_bfloat16") instead.'
            )

    def _is_another_context(self) -> bool:
        """Return whether autocast has no cast of the marker: it was 0, and is 1 since."""
        if self._marker is not None and not self._cast_of_marker():
            return False
        self._marker = torch.nn.Parameter(torch.zeros((1, 1), device=self._device))
        self._cast_of_marker()
        with torch.no_grad():
            self._marker.fill_(1)
        return True

    def _cast_of_marker(self) -> float:
        return float(torch.mm(self._marker, torch.ones_like(self._marker)).detach())


def checksum(tensor: Any) -> int:
    """Return a number that differs, in all likelihood, if a value of the tensor does."""
    flat = flattened(tensor)
    if flat.device.type != "cpu":  # its values stay there
        flat = sums_along_sides(flat).cpu()
    return zlib.crc32(flat.view(torch.uint8).numpy()) if len(flat) else 0


def flattened(tensor: Any) -> Any:
    """Return the values of a tensor in one row, which can be viewed as bytes.

    A tensor of one value counts as contiguous with any stride, and PyTorch views no such one.
    """
    flat = tensor.detach().contiguous()
    return flat.as_strided((flat.numel(),), (1,))


def sums_along_sides(flat: Any) -> Any:
    """Return the sums of the rows and of the columns of a square that a flat tensor fills.

    Its bits are summed as integers. One value that changes, or two that change places, give others.
    """
    bits = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
    bits = bits.view(_INTEGERS[bits.element_size()])
    side = math.isqrt(len(bits))
    square = bits[: side * side].view(side, side)
    sums = (square.sum(0, dtype=torch.int64), square.sum(1, dtype=torch.int64))
    return torch.cat([*sums, bits[side * side :].to(torch.int64)])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of that many bytes."""
