"""CuDNN recurrent weights, as the plain layers store them.

CuDNNLSTM and CuDNNGRU kept the matrices of each gate transposed and two biases;
Keras 3's LSTM and GRU(reset_after=True) compute the same from the converted ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.rescue.leaves import Slot

Convert = Callable[[Any], Any]


@dataclass(frozen=True)
class Dialect:
    """One way in which files store a layer: a shape and a conversion for each slot."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    converts: tuple[Convert | None, ...]


def dialects(class_name: str, layer: Any, slots: tuple[Slot, ...]) -> tuple[Dialect, ...]:
    """The ways in which an old file may store this layer's weights."""
    plain = Dialect("plain", tuple(slot.shape for slot in slots), (None,) * len(slots))
    gates = _gates(layer)
    if gates is None or not all(slot.key[-1] in _KINDS for slot in slots):
        return (plain,)
    shapes, converts = [], []
    for slot in slots:
        kind = slot.key[-1]
        units = slot.shape[-1] // gates
        shapes.append((2 * gates * units,) if kind == "bias" else slot.shape)
        converts.append(_converter(kind, gates))
    native = Dialect("CuDNN", tuple(shapes), tuple(converts))
    return (native,) if class_name.startswith("CuDNN") else (plain, native)


def turned(matrix: Any, gates: int) -> Any:
    """The kernel of CuDNN gates as a plain layer multiplies with it.

    Each gate's block lies as (units, inputs) in memory and is declared (inputs, units).
    """
    import numpy as np

    blocks = np.split(matrix, gates, axis=1)
    return np.hstack([b.reshape(b.shape[1], b.shape[0]).T for b in blocks])


_KINDS = ("kernel", "recurrent_kernel", "bias")


def _gates(layer: Any) -> int | None:
    import keras

    if isinstance(layer, keras.layers.Bidirectional):
        return _gates(layer.forward_layer)
    if isinstance(layer, keras.layers.LSTM) and layer.use_bias:
        return 4
    if isinstance(layer, keras.layers.GRU) and layer.use_bias and layer.reset_after:
        return 3
    return None


def _converter(kind: str, gates: int) -> Convert:
    if kind == "bias" and gates == 4:
        return lambda bias: bias.reshape(2, -1).sum(axis=0)
    if kind == "bias":
        return lambda bias: bias.reshape(2, -1)
    return lambda matrix: turned(matrix, gates)
