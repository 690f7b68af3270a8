"""What the processes of a pool have in common besides a model, and how they compare values."""

import zlib
from typing import Any

import keras
import torch

from lockstep.keras_compat import compute_in_float64, computes_in_float64, names_mean_float64

Settings = dict[str, Any]


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
        "deterministic": torch.are_deterministic_algorithms_enabled(),
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
    torch.use_deterministic_algorithms(settings["deterministic"])


def checksum(tensor: Any) -> int:
    """Return a number that differs, in all likelihood, if a value of the tensor does."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy()) if len(flat) else 0
