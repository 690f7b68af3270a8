"""The engine that serves the backend Keras runs on."""

from lockstep.engines.engine import Engine
from lockstep.errors import UnsupportedBackend


def current_engine() -> Engine:
    """The engine for Keras's backend; imports Keras, and no other framework.

    Raises:
        UnsupportedBackend: If no engine serves that backend yet.
    """
    import keras

    backend = keras.backend.backend()
    if backend == "jax":
        from lockstep.engines.jax.engine import JaxEngine

        return JaxEngine()
    if backend == "tensorflow":
        from lockstep.engines.tensorflow.engine import TensorFlowEngine

        return TensorFlowEngine()
    raise UnsupportedBackend(
        f"Keras runs on {backend!r}, and lockstep has engines for 'jax' and 'tensorflow' so far;\n"
        "a .keras file moves between backends. Set KERAS_BACKEND=jax before Keras is imported."
    )
