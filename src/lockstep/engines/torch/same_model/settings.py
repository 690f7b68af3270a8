"""What the processes of a pool have in common besides a model, and how they compare values."""

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch

from lockstep.engines.torch.exchange.placement import flattened
from lockstep.keras_compat import compute_in_float64, computes_in_float64, names_mean_float64

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
        "precision": _precision(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "autocast": {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _KINDS
        },
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "anomalies": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "flash_attention": keras.config.is_flash_attention_enabled(),
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
    _set_precision(settings["precision"])
    deterministic, warn_only = settings["deterministic"]
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    for kind, (enabled, dtype) in settings["autocast"].items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(settings["autocast_cache"])
    torch.clear_autocast_cache()
    if settings["anomalies"] != (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()):
        torch.autograd.set_detect_anomaly(*settings["anomalies"])  # it warns that it is slow
    if settings["flash_attention"] is False:
        keras.config.disable_flash_attention()
    elif settings["flash_attention"]:
        keras.config.enable_flash_attention()
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = settings["cudnn"]


@contextmanager
def full_precision() -> Iterator[None]:
    """Use no short floats for products and convolutions of float32 inside the context."""
    before, cudnn = _precision(), torch.backends.cudnn
    torch.set_float32_matmul_precision("highest")
    if hasattr(cudnn, "conv"):
        cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "ieee"
    else:
        cudnn.allow_tf32 = False
    try:
        yield
    finally:
        _set_precision(before)


def _precision() -> tuple[Any, ...]:
    """Return what decides whether PyTorch uses short floats for float32, by old and new names.

    Reading an old name raises once a new one has been set to something else.
    """
    old: list[Any] = []
    for read in (
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: torch.backends.cudnn.allow_tf32,
    ):
        try:
            old.append(read())
        except RuntimeError:
            old.append(None)
    return *old, tuple(each.fp32_precision for each in _with_new_names())


def _set_precision(precision: tuple[Any, ...]) -> None:
    """Set what `_precision` has returned, here or in another process."""
    products, on_cuda, on_cudnn, new = precision
    if products is not None:
        torch.set_float32_matmul_precision(products)
    # Setting one name may change others.
    if on_cuda is not None and _precision()[1] != on_cuda:
        torch.backends.cuda.matmul.allow_tf32 = on_cuda
    if on_cudnn is not None and _precision()[2] != on_cudnn:
        torch.backends.cudnn.allow_tf32 = on_cudnn
    for each, value in zip(_with_new_names(), new, strict=True):
        if each.fp32_precision != value:
            each.fp32_precision = value


def _with_new_names() -> list[Any]:
    """Return what has `fp32_precision`, the general ones first; nothing before PyTorch 2.9."""
    found: list[Any] = [torch.backends]
    for each in (torch.backends.cudnn, torch.backends.mkldnn):
        found += [each, *(getattr(each, name, None) for name in ("matmul", "conv", "rnn"))]
    found.append(torch.backends.cuda.matmul)
    return [each for each in found if hasattr(each, "fp32_precision")]


def checksum(tensor: Any) -> int:
    """Return a number that differs, in all likelihood, if a value of the tensor does."""
    flat = flattened(tensor)
    if flat.device.type != "cpu":  # its values stay there
        flat = sums_along_sides(flat).cpu()
    return zlib.crc32(flat.view(torch.uint8).numpy()) if len(flat) else 0


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
