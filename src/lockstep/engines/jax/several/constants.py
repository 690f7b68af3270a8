"""What a program has as constants and no variable holds: the statistics of `Normalization`."""

from typing import Any

import jax.numpy as jnp
import keras


class Constant:
    """One of them, with what sharing asks of a variable."""

    def __init__(self, layer: Any, name: str) -> None:
        self._layer, self._name = layer, name

    @property
    def value(self) -> Any:
        """The array that the layer computes with."""
        return getattr(self._layer, self._name)

    def assign(self, value: Any) -> None:
        """Let the layer compute with another array."""
        setattr(self._layer, self._name, jnp.asarray(value))


def constants_of(model: Any) -> list[Constant]:
    """The constants of the layers of a model that are built."""
    # keras/src/layers/preprocessing/normalization.py, Normalization.finalize_state: `mean` and
    # `variance` are copies of the variables, made when the layer is built, adapted or loaded.
    return [
        Constant(layer, name)
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Normalization) and layer.built
        for name in ("mean", "variance")
    ]
