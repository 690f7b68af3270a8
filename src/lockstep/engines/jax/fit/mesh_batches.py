"""The batches of the host for a mesh."""

from collections.abc import Callable, Iterator
from typing import Any

import keras

from lockstep.engines.jax.steps.execution import (
    GROUPS_OF,
    State,
    StepFunction,
)
from lockstep.keras_compat import (
    GeneratorDataAdapter,
    GrainDatasetAdapter,
    batch_size_of,
    take_jax_state,
)
from lockstep.processes import process_group
from lockstep.processes.agreement import DataCheck
from lockstep.processes.own_rows import OwnRows
from lockstep.training.arrays import plain_arrays
from lockstep.training.input import BatchesAhead, HostIterator


class MeshIterator(HostIterator):
    """Iterate over host batches for a mesh.

    Keras's own iterator for JAX puts each batch on the first device of an accelerator.

    Attributes:
        ahead: Puts batches on the devices a step ahead, if steps are compiled.
    """

    ahead: BatchesAhead | None = None

    # keras/src/backend/jax/trainer.py, JAXEpochIterator

    def _batches(self) -> Iterator[Any]:
        batches = super()._batches()
        if not self._may_draw_ahead():
            return batches
        sender = self._sender() or BatchesAhead(lambda batch: batch)
        return sender.over(self._noted(batches))

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.last_drawn = batch
            yield batch

    def _may_draw_ahead(self) -> bool:
        adapter = self.data_adapter
        ends_once = isinstance(adapter, OwnRows) and adapter.ends_once
        if not self.draws_ahead or ends_once or isinstance(adapter, GeneratorDataAdapter):
            return False  # a generator would lose a batch at the end of a `fit`
        # The position of a Grain source is that before its last draw.
        return not (self.recorded and isinstance(adapter, GrainDatasetAdapter))

    def _sender(self) -> BatchesAhead | None:
        """Return what puts batches on the devices a step ahead, `None` if nothing does."""
        is_alone = self.steps_per_execution == 1  # several are put there as one stack
        return self.ahead if is_alone and self._may_draw_ahead() else None

    def let_rows_stay(self, stays: Callable[[tuple[int, ...]], bool]) -> None:
        """Let rows of each process stay there, if `stays` says so of a batch.

        A stack of several steps is made on the host, of whole batches.
        """
        if isinstance(self.data_adapter, OwnRows) and self.steps_per_execution == 1:
            self.data_adapter.let_rows_stay(stays)

    def may_run_at_once(self, model: Any) -> bool:
        """Return whether several training steps may run as one program, and are short."""
        step = model.train_function
        arrays = plain_arrays(self.data_adapter)
        if not isinstance(step, StepFunction) or step.is_short is None or arrays is None:
            return False
        state: State = take_jax_state(model, **dict.fromkeys(GROUPS_OF["train"], True))
        first = arrays.batch(slice(0, batch_size_of(self.data_adapter)))
        return step.is_short(step.settle(state), step.place(first))

    def watch(self, watched: bool) -> None:
        """Set whether callbacks run between steps."""
        super().watch(watched)
        self.copies = watched or self._sender() is None  # a batch that is sent ahead is a copy

    def _new_check(self) -> DataCheck | None:
        return DataCheck(every_pull=True) if process_group.several() else None

    def _source(self) -> Any:
        return self.data_adapter.get_jax_iterator()


def call_on_first_batch(model: Any, batches: HostIterator) -> None:
    """Build the layers of a model that has never been called, on the first batch."""
    for _, _, iterator in batches:
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(next(iterator))
        with keras.StatelessScope():
            model(inputs)
        break
