"""The engine that serves the backend Keras runs on."""

import os

from lockstep.engines.engine import Engine
from lockstep.errors import UnsupportedBackend

_PREVIEW = "LOCKSTEP_PREVIEW"
"""Names the backend whose unfinished engine is wanted all the same."""


def current_engine() -> Engine:
    """The engine for Keras's backend; imports Keras, and no other framework.

    Raises:
        UnsupportedBackend: If no engine serves that backend yet.
    """
    import keras

    backend = keras.backend.backend()
    if backend == "jax":
        from lockstep.engines.jax import JaxEngine

        return JaxEngine()
    if backend == "tensorflow" and os.environ.get(_PREVIEW) == backend:
        from lockstep.engines.tensorflow import TensorFlowEngine

        return TensorFlowEngine()
    preview = f"\nOr try the preview of its engine: {_PREVIEW}=tensorflow, docs/tensorflow.md."
    raise UnsupportedBackend(
        f"Keras runs on {backend!r}, and lockstep has an engine for 'jax' so far; a .keras file "
        "moves between\nbackends as it is. Set KERAS_BACKEND=jax before Keras is imported."
        + (preview if backend == "tensorflow" else "")
    )
