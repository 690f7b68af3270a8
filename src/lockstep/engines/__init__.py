"""Selects the engine for the backend of Keras."""

from typing import TYPE_CHECKING

from lockstep.errors import UnsupportedBackend

if TYPE_CHECKING:
    from lockstep.core.engine import Engine


def current_engine() -> "Engine":
    """Return the engine for Keras's backend. Only Keras and that backend are imported.

    Raises:
        UnsupportedBackend: If there is no engine for that backend yet.
    """
    import keras

    backend = keras.backend.backend()
    if backend == "jax":
        from lockstep.engines.jax.engine import JaxEngine

        return JaxEngine()
    if backend == "tensorflow":
        from lockstep.engines.tensorflow.engine import TensorFlowEngine

        return TensorFlowEngine()
    if backend == "torch":
        from lockstep.engines.torch.engine import TorchEngine

        return TorchEngine()
    raise UnsupportedBackend(
        f"Keras runs on {backend!r}, but lockstep supports only 'jax', 'tensorflow' and "
        "'torch'.\nA .keras file can be loaded on any backend. Set KERAS_BACKEND=jax before "
        "Keras is imported."
    )
