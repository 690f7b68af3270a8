"""The TensorFlow engine: mirrored variables, and replicas that run each step together."""

from typing import Any

from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

from lockstep.devices import Device
from lockstep.engines.engine import Engine, no_shards
from lockstep.engines.tensorflow import devices as tensorflow_devices
from lockstep.engines.tensorflow.probe import TensorFlowProbe
from lockstep.engines.tensorflow.session import TensorFlowSession
from lockstep.errors import UnsupportedBackend
from lockstep.launch.environment import Place
from lockstep.layout import Layout


class TensorFlowEngine(Engine):
    """Runs Keras models on TensorFlow devices; see `Engine` for the contract."""

    name = "tensorflow"

    def devices(self) -> tuple[Device, ...]:
        """Return the devices of TensorFlow, accelerators first."""
        return tensorflow_devices.list_devices()

    def rehearse(self, devices: int) -> None:
        """Make `devices` virtual CPU devices and hide accelerators."""
        tensorflow_devices.make_virtual(devices)

    def join(self, place: Place) -> tuple[int, int]:
        """Return the place of a single process; this engine runs in one."""
        if place.size > 1:
            raise UnsupportedBackend(
                f"This is {place}, and on 'tensorflow' lockstep trains in one process so far.\n"
                "Set KERAS_BACKEND=jax, or LOCKSTEP_PROCESSES=1 for trainings that are apart."
            )
        return place.rank, place.size

    def session(self, model: Any, layout: Layout) -> TensorFlowSession:
        """Return a session of `model`; see `Engine`."""
        return TensorFlowSession(model, layout)

    def check_shards(self) -> None:
        """Raise: this engine cannot shard variables."""
        raise no_shards(
            "TensorFlow",
            "A graph may hold the gathered weights of all layers at once: no memory is saved.",
            "Run the same script with KERAS_BACKEND=jax.",
        )

    def empty_value(self, variable: Any) -> Any:
        """Return a variable that was never initialized, as Keras asks it for its identity."""
        return UninitializedVariable(
            trainable=variable.trainable, shape=variable.shape, dtype=variable.dtype
        )

    def exchanged(self, values: Any, source: str, target: str) -> tuple[Any, Any]:
        """Copy integers from one device to another, and sum what both hold."""
        return tensorflow_devices.exchanged(values, source, target)

    def probe(self, model: Any) -> TensorFlowProbe:
        """Return a probe for the steps of `model`, attached or not."""
        return TensorFlowProbe(model)
