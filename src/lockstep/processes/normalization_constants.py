"""The mean and variance of `Normalization`: a program has them as constants, in no variable."""

from typing import Any

import keras

from lockstep.keras_compat import layers_in


class NormalizationConstant:
    """One constant, with the part of a variable's interface that sharing needs."""

    def __init__(self, layer: Any, name: str) -> None:
        self._layer, self._name = layer, name

    @property
    def value(self) -> Any:
        """The array that the layer computes with."""
        return getattr(self._layer, self._name)

    def assign(self, value: Any) -> None:
        """Replace the array that the layer computes with."""
        setattr(self._layer, self._name, keras.ops.convert_to_tensor(value))


def constants_of(model: Any) -> list[NormalizationConstant]:
    """Return the constants of the built layers of a model."""
    # keras/src/layers/preprocessing/normalization.py, Normalization.finalize_state: `mean` and
    # `variance` are copies of the variables, made when the layer is built, adapted or loaded.
    return [
        NormalizationConstant(layer, name)
        for layer in layers_in(model)
        if isinstance(layer, keras.layers.Normalization) and layer.built
        for name in ("mean", "variance")
    ]
