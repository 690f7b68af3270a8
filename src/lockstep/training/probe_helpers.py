"""Helpers of the probes of all backends."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import keras
import numpy as np

from lockstep.core.patched import patched
from lockstep.core.state import unique
from lockstep.errors import UnusableData
from lockstep.keras_compat import (
    build_from_batch,
    computes_in_float64,
    layers_not_in_float64,
)
from lockstep.training.logs import pythonify_logs

SHORT_FLOATS = ("bfloat16", "float16", "float32")
"""Float types that are shorter than float64, by the digits that they keep."""


def shortest_cast(model: Any, casts: Callable[[], Iterable[str]]) -> str | None:
    """Return the shortest float type to which a step of a model in float64 casts values.

    Args:
        model: A built model.
        casts: Returns all such types. It is called if the model computes in float64.
    """
    if computes_in_float64() and not layers_not_in_float64(model):
        with suppress(Exception):  # a step that cannot be traced
            return min(casts(), key=SHORT_FLOATS.index, default=None)
    return None


def watched_layers(model: Any) -> list[Any]:
    """Return the layers of a model and of nested models, each once."""
    found: list[Any] = []
    for layer in model.layers:
        found += watched_layers(layer) if isinstance(layer, keras.Model) else [layer]
    return unique(found)


Record = Callable[[Any, Any, Any], None]
"""Is given a layer, the arguments of its call, and the outputs."""


@contextmanager
def calls_watched(layers: list[Any], record: Record) -> Iterator[None]:
    """Call `record` in this context with what the `call` of each layer gives, before any hook."""

    def recorded(layer: Any) -> Callable[..., Any]:
        call = layer.call

        def recorded_call(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            record(layer, args, outputs)
            return outputs

        return recorded_call

    with patched([(layer, "call", recorded(layer)) for layer in layers]):
        yield


def tensors(batch: Any) -> Any:
    """Return a batch of host arrays as tensors of the backend."""
    return keras.tree.map_structure(
        lambda leaf: leaf if leaf is None else keras.ops.convert_to_tensor(leaf), batch
    )


def trained_once(model: Any, batch: Any) -> dict[str, Any]:
    """Train one step on a batch in the structure of `fit`, and return the logs."""
    # keras/src/backend/*/trainer.py, train_on_batch
    model.make_train_function()
    model.reset_metrics()
    logs = pythonify_logs(model.train_function([tensors(batch)]))
    return {name: np.asarray(value) for name, value in logs.items()}


def build_symbolically(model: Any, batch: Any) -> None:
    """Build a model, its metrics and its optimizer from a batch, without a computation.

    Raises:
        UnusableData: If Keras cannot build the model from the batch.
    """
    try:
        build_from_batch(model, batch)
    except RuntimeError as error:
        raise not_built(model, error) from error


def not_built(model: Any, error: Exception) -> UnusableData:
    """Return the error for a model that Keras cannot build from a batch."""
    reason = str(error).strip().splitlines()[-1][:160]
    return UnusableData(
        f"{model.name!r} is not built, and Keras cannot build it from a batch: {reason}\n"
        "Build it first, for example with a short call of its own fit, and then verify it."
    )
