"""Kernels of convolutions that the Theano backend saved.

Theano convolved where TensorFlow correlates: its kernels lie turned by half a turn in
every spatial dim. Keras 2 turned them when another backend loaded the file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.errors import UntranslatableModel
from lockstep.rescue.keras2 import OldFile
from lockstep.rescue.match import Pair
from lockstep.rescue.plan import Plan

_CONVOLUTIONS = (
    *("Conv1D", "Conv2D", "Conv3D", "Conv2DTranspose", "ConvLSTM2D"),
    *("Convolution1D", "Convolution2D", "Convolution3D"),
    *("TimeDistributed", "Bidirectional"),  # around one of these
)


def require_known_layout(old: OldFile) -> None:
    """Raise for convolutions of Keras 1, whose files do not tell how their kernels lie.

    Raises:
        UntranslatableModel: They are in it; the error names the first.
    """
    for stored in (one for group in old.groups for one in group.weights):
        name = stored.name.partition(":")[0]
        if not old.version and name.endswith("_W") and len(stored.shape) > 2:
            raise UntranslatableModel(
                f"{name} {stored.shape} is a kernel of Keras 1, in the order of Theano or of "
                "TensorFlow: the file does not\ntell which, and the wrong one computes other "
                "numbers. Load it in Keras 2.0 to 2.2 with the model's\ncode, save it there, and "
                "rescue that file; or take the arrays alone: -o arrays.safetensors."
            )


def turned(old: OldFile, found: Plan) -> Plan:
    """The plan with the kernels of convolutions turned, where Theano saved the file."""
    if old.backend != "theano":
        return found
    return replace(
        found,
        pairs=tuple(
            replace(pair, convert=half_turn) if _convolves(pair) else pair for pair in found.pairs
        ),
    )


def half_turn(kernel: Any) -> Any:
    """A kernel reversed in all dims but the last two, which are channels.

    Example:
        >>> import numpy as np
        >>> half_turn(np.arange(3).reshape(3, 1, 1)).ravel()
        array([2, 1, 0])
    """
    return kernel[(slice(None, None, -1),) * (kernel.ndim - 2)]


def _convolves(pair: Pair) -> bool:
    kind = pair.stored.name.partition(":")[0].rpartition("/")[2]
    kernel = kind in ("kernel", "recurrent_kernel") and len(pair.stored.shape) > 2
    return kernel and pair.leaf.class_name in _CONVOLUTIONS
