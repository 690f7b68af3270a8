"""One model on a mesh, as the loop of `fit`, `evaluate` and `predict` uses it."""

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep.checkpoint.fit_run import Snapshot
from lockstep.engines.jax.jax_group import GROUP
from lockstep.engines.jax.snapshot_buffers import SnapshotBuffers
from lockstep.engines.jax.steps.epoch import run_epoch
from lockstep.engines.jax.steps.live_state import GROUPS_OF
from lockstep.engines.jax.steps.padded import fetched
from lockstep.engines.jax.variable_sync import group_of, to_default_device
from lockstep.keras_compat import JAX_STATE, JAX_STATE_SYNCED, build_on_first_batch, is_built
from lockstep.processes import process_group
from lockstep.processes.agreement import DataCheck
from lockstep.state import named_variables
from lockstep.training.callbacks import see_every_batch
from lockstep.training.input import HostIterator
from lockstep.training.session import PREDICT, Begin, Each, End, Kind, Session, recorded_type


class JaxSession(Session):
    """Give the loop one model on a mesh; see `Session`."""

    array_type = jax.Array
    finalizes_always = True

    def __init__(self, model: Any, devices: tuple[str, ...]) -> None:
        super().__init__(model, devices)
        self._many = len(devices) > 1 and not process_group.several()

    def batches(self, kind: Kind, *, recorded: bool = False, **data: Any) -> Any:
        """Return an iterator over host batches."""
        made = recorded_type(kind, MeshIterator) if recorded else MeshIterator
        return made(**data)

    def build(self, batches: Any, kind: Kind) -> None:
        """Build what is not built yet on the first batch, and reset the iterator."""
        model = self.model
        if kind is not PREDICT:
            batches.build(lambda: build_on_first_batch(model, batches))
        elif not is_built(model):
            batches.build(lambda: _call(model, batches))

    def fit_state(self) -> "JaxFitState":
        """Return access to the variables, for a checkpoint of one `fit`."""
        return JaxFitState(self.model, on_host=self.devices[0].startswith("cpu"))

    def is_compiled(self) -> bool:
        """Return whether a step is one program."""
        return not self.model.run_eagerly and bool(self.model.jit_compile)

    def plan_epoch(self, batches: Any, callbacks: Any, kind: Kind) -> None:
        """Note whether callbacks run between two steps of the next epoch."""
        batches.watch(see_every_batch(callbacks, kind.name))

    def run_epoch(
        self, kind: Kind, batches: Any, begin: Begin, end: End, each: Each | None = None
    ) -> Any:
        """Run the steps of one epoch."""
        return run_epoch(self.model, kind, batches, begin, end, each)

    def sync(self) -> None:
        """Write the state of a running epoch into the variables."""
        self.model.jax_state_sync()

    def sync_metrics(self) -> None:
        """Write the state into the variables, and move metrics to the default device."""
        self.model.jax_state_sync()
        if self._many:  # else every device would compute the same
            to_default_device(self.model.metrics_variables)

    def clear(self) -> None:
        """Forget the state of the last epoch; the variables hold it."""
        vars(self.model)[JAX_STATE] = None

    def fetched(self, outputs: Any) -> Any:
        """Fetch the stacked predictions of several steps."""
        return fetched(outputs)

    def joined(self, every: list[Any]) -> Any:
        """Return all rows of the predictions of several steps, as NumPy arrays."""
        jax.block_until_ready(every)
        if not keras.tree.is_nested(every[0]):
            return _joined(*every)
        return keras.tree.map_structure(_joined, *every)


class MeshIterator(HostIterator):
    """Iterate over host batches for a mesh.

    Keras's own iterator for JAX puts each batch on the first device of an accelerator.
    """

    # keras/src/backend/jax/trainer.py, JAXEpochIterator

    def _new_check(self) -> DataCheck | None:
        return DataCheck(every_pull=True) if process_group.several() else None

    def _source(self) -> Any:
        return self.data_adapter.get_jax_iterator()


class JaxFitState:
    """Give access to the variables in a `fit` on JAX; see `lockstep.checkpoint.fit_run.FitState`.

    Args:
        model: The model.
        on_host: Whether its devices are CPUs.
    """

    def __init__(self, model: Any, on_host: bool) -> None:
        self._model = model
        self._buffers = SnapshotBuffers(on_host)

    def snapshot(self, logs: dict[str, Any]) -> Snapshot:
        """Copy every variable and the logs of the last step; see `snapshot_buffers.py`."""
        names = list(named_variables(self._model))
        values = [_on_one_device(value) for value in self._values()]
        variables = len(values)
        # `dict.items` bypasses the fetch of `LazyLogs`. A step does not donate its logs.
        for name, value in dict.items(logs):
            if isinstance(value, (str, bytes)) or value is None:  # added by a callback
                continue
            names.append(f"logs/{name}")
            values.append(jnp.asarray(value))
        arrays = [
            (name, str(value.dtype), tuple(value.shape))
            for name, value in zip(names, values, strict=True)
        ]
        return Snapshot(variables, arrays, self._buffers.of(names, values))

    def sync(self) -> None:
        """Write the state of the step into the variables."""
        self._model.jax_state_sync()

    def _values(self) -> list[Any]:
        # Within an epoch the state is outside the variables, unless a callback has synced it.
        attributes = vars(self._model)
        state = attributes.get(JAX_STATE)
        variables = named_variables(self._model).values()
        if not state or attributes.get(JAX_STATE_SYNCED, True):
            return [variable.value for variable in variables]
        groups = ((group_of(self._model, name), state.get(name)) for name in GROUPS_OF["train"])
        held = {id(v): value for group in groups for v, value in zip(*group, strict=True)}
        return [held[id(variable)] for variable in variables]


def _on_one_device(value: Any) -> Any:
    value = GROUP.local(value)
    return value.addressable_data(0) if value.is_fully_replicated else value


def _joined(*parts: Any) -> np.ndarray:
    # One by one: np.concatenate is slower at converting JAX arrays.
    return np.concatenate([np.asarray(part) for part in parts])


def _call(model: Any, batches: HostIterator) -> None:
    """Build the layers of a model that has never been called, on the first batch."""
    for _, _, iterator in batches:
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(next(iterator))
        with keras.StatelessScope():
            model(inputs)
        break
