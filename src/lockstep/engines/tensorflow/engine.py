"""The TensorFlow engine: mirrored variables, and replicas that run each step together."""

from contextlib import AbstractContextManager
from typing import Any

from lockstep.core.devices import Device
from lockstep.core.engine import Engine
from lockstep.core.environment import Place
from lockstep.core.layout import Layout
from lockstep.engines.tensorflow import devices as tensorflow_devices
from lockstep.engines.tensorflow.first_step.verify_probe import TensorFlowProbe
from lockstep.engines.tensorflow.session import TensorFlowSession
from lockstep.errors import UnsupportedBackend


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
                f"This is {place}, but on 'tensorflow' lockstep supports only one process.\n"
                "Set KERAS_BACKEND=jax, or LOCKSTEP_PROCESSES=1 for independent runs."
            )
        return place.rank, place.size

    def session(self, model: Any, layout: Layout) -> TensorFlowSession:
        """Return a session of `model`; see `Engine`."""
        if layout.is_sharded:
            raise _no_shards()
        return TensorFlowSession(model, layout)

    def made_in_shards(self, devices: tuple[str, ...]) -> AbstractContextManager[None]:
        """Raise: this engine cannot shard variables."""
        raise _no_shards()

    def sharded_dims(self, model: Any, devices: int) -> dict[int, int | None]:
        """Raise: this engine cannot shard variables."""
        raise _no_shards()

    def probe(self, model: Any) -> TensorFlowProbe:
        """Return a probe for the steps of `model`, attached or not."""
        return TensorFlowProbe(model)


def _no_shards() -> UnsupportedBackend:
    return UnsupportedBackend(
        'state="sharded" was requested, but TensorFlow supports only state="replicated".\nA '
        "graph may hold the gathered weights of all layers at once, so no memory would be "
        "saved.\nRun the same script with KERAS_BACKEND=jax."
    )
