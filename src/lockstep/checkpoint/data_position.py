"""Record the position of a run in its data, and restore it."""

import functools
import math
import warnings
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from lockstep.checkpoint.data_states import (
    STILL_POSSIBLE,
    adapter_here,
    check_batch,
    check_data,
    checksum,
    is_of_as_many,
    is_own,
    own_states,
    put_epoch,
    put_own_states,
    put_states,
    states_of,
)
from lockstep.core.engine import PREDICT, TEST, TRAIN, Kind
from lockstep.errors import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointWarning,
    PredictionFileError,
    counted,
    first_line,
)
from lockstep.keras_compat import (
    ArrayDataAdapter,
    EpochIterator,
    GeneratorDataAdapter,
    GrainDatasetAdapter,
    PyDatasetAdapter,
    TFDatasetAdapter,
    TorchDataLoaderAdapter,
    has_workers,
)
from lockstep.processes.own_rows import OwnRows, brings_own_rows
from lockstep.processes.row_exchange import rows_of_process

# The adapters and their attributes: keras/src/trainers/data_adapters/*.py


class Pass:
    """One pass over the data, with a count of the batches drawn.

    Attributes:
        random: The random states before the first batch was drawn.
        drawn: Number of batches drawn.
        first: The checksum of the first batch, if batches are compared.
        last: The last batch, if batches are compared.
        before_last: The state of the source before the last batch, if the source has one.
    """

    def __init__(
        self, batches: Iterator[Any], adapter: Any, verified: bool, source: Any = None
    ) -> None:
        self._batches = batches
        self._source = source
        self._adapter = adapter
        self._verified = verified
        self.random: dict[str, Any] | None = None
        self.drawn = 0
        self.first: int | None = None
        self.last: Any = None
        self.before_last: Any = None

    def __iter__(self) -> "Pass":
        return self

    def __next__(self) -> Any:
        if self.random is None:
            self.random = states_of(self._adapter)
        before = None if self._source is None else self._source.get_state()
        batch = next(self._batches)
        self.before_last = before  # unchanged at the end of the data
        self.drawn += 1
        if self._verified:
            self.last = batch
            if self.drawn == 1:
                self.first = checksum(batch)
        return batch


class TrainingPosition(EpochIterator):  # type: ignore[misc]  # Keras has no types
    """An iterator over epochs that reports its position, and can begin at another one.

    This is a mixin before an engine's iterator. Besides the members of `EpochIterator`, the
    iterator has `data_adapter`, `skip` (number of array batches that the next pass omits),
    `draws_ahead`, `_batches()` (returns a pass) and `_source()` (returns the source of a pass).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._verified = not isinstance(self.data_adapter, ArrayDataAdapter)
        self._looked_at: dict[str, Any] | None = None
        self._forget()
        check_data(self.data_adapter, self.steps_per_epoch)

    def _forget(self) -> None:
        self._pass: Pass | None = None
        self._passes: list[int] = []
        self._first: int | None = None
        self._before: dict[str, Any] | None = None
        self._wanted: dict[str, Any] | None = None
        self._now: dict[str, Any] | None = None
        self._first_step = 0
        self._with_state: Any = None

    def reset(self) -> None:
        """Forget every pass, including the batch that Keras drew to build the model."""
        super().reset()
        looked = self._pass
        if looked is not None and looked.drawn and self._is_looked_at():
            self._looked_at = {"first": looked.first, "random": looked.random}
        self._forget()

    def position(self, step: int) -> dict[str, Any]:
        """Return the position after `step` steps of an epoch; 0 means between two epochs."""
        current = self._pass
        goes_on = current is not None and current.drawn > 0
        if step == 0:  # only with steps_per_epoch does the next epoch reuse the iterator
            goes_on = goes_on and bool(self.steps_per_epoch) and self._current_iterator is current
        passes = [*self._passes]
        if current is not None and current.drawn and not goes_on:
            passes.append(current.drawn)
        return {
            "step": step,
            "passes": passes,
            "drawn": current.drawn if goes_on and current else 0,
            "random": current.random if goes_on and current else None,
            "before": self._before if goes_on and has_workers(self.data_adapter) else None,
            "first": current.first if current and current.drawn else self._first,
            "last": checksum(current.last) if goes_on and current and self._verified else None,
            "source": current.before_last if goes_on and current else None,
            "steps_seen": self._steps_seen,
            "batches": self._num_batches,
            "looked_at": self._looked_at,
            "ahead": self.draws_ahead,
            "next": self._next() if goes_on else None,
            "now": states_of(self.data_adapter),
        }

    def _next(self) -> int | None:
        """Return the checksum of the batch that was drawn ahead, `None` without one."""
        is_known = self._verified and self.last_drawn is not None
        return checksum(self.last_drawn) if is_known else None

    def begin_at(self, position: dict[str, Any]) -> None:
        """Begin the next epoch at a position that another run over the same data recorded.

        Raises:
            CheckpointMismatch: If the data yields other batches.
        """
        self._forget()
        self.draws_ahead = position["ahead"]
        if not is_of_as_many(self.data_adapter, position["now"]):  # the caller begins at an epoch
            put_states(self.data_adapter, position["now"])
            return
        self._num_batches = position["batches"]
        self._first_step = position["step"]
        self._go_over_again(position)
        self._passes = list(position["passes"])
        self._look_again(position)
        if not position["drawn"]:
            put_states(self.data_adapter, position["now"])
        elif self.steps_per_epoch:
            self._current_iterator = self._advanced(position)
            self._steps_seen = position["steps_seen"] - position["step"]
            if position["step"]:  # set after the epoch begins, which may draw random numbers
                self._now = position["now"]
            else:
                put_states(self.data_adapter, position["now"])
        else:
            self._wanted = position
            # A sampler gets the epoch before its pass begins.
            put_epoch(self.data_adapter, position["random"])

    def _enumerate_iterator(self) -> Iterator[Any]:
        first_step, self._first_step = self._first_step, 0
        if has_workers(self.data_adapter):  # their thread draws the order when it starts
            if self._wanted is not None:
                put_states(self.data_adapter, self._wanted["before"])
            self._before = states_of(self.data_adapter)
        now, self._now = self._now, None
        for first, last, iterator in super()._enumerate_iterator():
            if now is not None:
                put_states(self.data_adapter, now)
                now = None
            if first < first_step <= last:
                raise CheckpointMismatch(
                    f"The checkpoint is after step {first_step} of its epoch, but with "
                    f"steps_per_execution={self.steps_per_execution} no execution begins at "
                    "this step.\nCompile with the steps_per_execution of the saved run."
                )
            if first >= first_step:
                yield first, last, iterator

    def _get_iterator(self) -> Iterator[Any]:
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            return self._new_pass()
        advanced = self._advanced(wanted)
        put_states(self.data_adapter, wanted["now"])
        return advanced

    def _new_pass(self) -> Pass:
        if self._pass is not None and self._pass.drawn:
            self._passes.append(self._pass.drawn)
            self._first = self._pass.first
        batches = super()._get_iterator()  # calls self._source
        self._pass = Pass(batches, self.data_adapter, self._verified, self._with_state)
        return self._pass

    def _source(self) -> Any:
        self._with_state = None
        source = super()._source()
        if isinstance(self.data_adapter, GrainDatasetAdapter):
            source = self._with_state = iter(source)
        return source

    def _advanced(self, position: dict[str, Any]) -> Pass:
        """Return a pass advanced by as many batches as that of the checkpoint."""
        drawn = position["drawn"]
        if isinstance(self.data_adapter, GeneratorDataAdapter):
            warnings.warn(
                f"{counted(drawn, 'batch')} of a generator {'is' if drawn == 1 else 'are'} "
                "drawn again to reach the saved position, which takes as long as the first "
                "time. Arrays and a PyDataset resume at once.",
                CheckpointWarning,
                stacklevel=2,
            )
        if not has_workers(self.data_adapter):
            put_states(self.data_adapter, position["random"])
        # For arrays, only the last batch is made; the next one follows from it.
        self.skip = 0 if self._verified else drawn - 1
        current = self._new_pass()
        self.skip, jumped = 0, self.skip
        if position["source"] is not None and self._with_state is not None:
            try:
                self._with_state.set_state(position["source"])
                jumped = drawn - 1
            except Exception as error:  # Grain compares what `repr` returns for the source
                self._warn_of_source(drawn, error)
                if not has_workers(self.data_adapter):
                    put_states(self.data_adapter, position["random"])
                current = self._new_pass()
        for _ in range(drawn - jumped):
            if next(current, None) is None:
                raise CheckpointMismatch(
                    f"The checkpoint is after batch {drawn}, but the data now end after batch "
                    f"{current.drawn}: they have changed.\n{STILL_POSSIBLE}"
                )
        current.drawn = drawn
        if self._verified and jumped:
            current.first = position["first"]
        if self._verified:
            check_batch(1, position["first"], current.first)
            check_batch(drawn, position["last"], checksum(current.last))
            if position["next"] is not None:
                check_batch(drawn + 1, position["next"], self._next())
        return current

    @staticmethod
    def _warn_of_source(drawn: int, error: Exception) -> None:
        warnings.warn(
            f"{counted(drawn, 'batch')} of Grain {'is' if drawn == 1 else 'are'} produced again "
            "to reach the saved position, because the saved state does not fit: "
            f"{first_line(error, 80)}\n"
            "To resume at once, give the data source a `__repr__` that is the same in every run.",
            CheckpointWarning,
            stacklevel=2,
        )

    def _go_over_again(self, position: dict[str, Any]) -> None:
        """Repeat the earlier passes of data whose next pass depends on them."""
        adapter, passes = self.data_adapter, position["passes"]
        ends_once = isinstance(adapter, OwnRows) and adapter.ends_once
        if (ends_once or isinstance(adapter, GeneratorDataAdapter)) and passes:
            raise CheckpointMismatch(
                "The generator ended before the position of the checkpoint, and a generator "
                "cannot restart.\nCall fit with steps_per_epoch, and a generator that yields "
                "batches for all epochs."
            )
        if not passes or not (isinstance(adapter, TFDatasetAdapter) or is_own(adapter)):
            return
        if isinstance(adapter, OwnRows) and not adapter.draws_seeds:
            return
        for _ in passes if position["drawn"] else passes[:-1]:
            if is_own(adapter):
                next(iter(super()._source()), None)
            else:  # a tf.data.Dataset draws the seed of a pass when its iterator is made
                iter(adapter.get_tf_dataset())
        if not position["drawn"]:
            check_batch(1, position["first"], checksum(next(super()._get_iterator(), None)))

    def _look_again(self, position: dict[str, Any]) -> None:
        """Compare the batch that Keras built the model from, redrawn from the same states.

        This applies only between two epochs.
        """
        self._looked_at = looked = position.get("looked_at")
        if looked is None or position["drawn"] or not self._is_looked_at():
            return
        put_states(self.data_adapter, deepcopy(looked["random"]))
        check_batch(1, looked["first"], checksum(next(self._batches(), None)))

    def _is_looked_at(self) -> bool:
        """Whether recorded states determine the first batch before any epoch."""
        adapter = self.data_adapter
        known = (PyDatasetAdapter, TorchDataLoaderAdapter, GrainDatasetAdapter)
        return isinstance(adapter, known) and not has_workers(adapter)


class ValidationPosition(EpochIterator):  # type: ignore[misc]  # Keras has no types
    """An iterator over validation data, with one pass for each validation.

    This is a mixin before an engine's iterator.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._passes = 0
        check_data(self.data_adapter, None)
        adapter = self.data_adapter
        if isinstance(adapter, OwnRows):
            ends_once = adapter.ends_once
        else:
            ends_once = isinstance(adapter, GeneratorDataAdapter)
        if ends_once:
            raise CheckpointError(
                "A generator was given as validation data. It continues from one validation to "
                "the next, and its\n"
                "position cannot be restored. Use arrays or a PyDataset for validation."
            )

    def position(self) -> dict[str, Any]:
        """Return the position of the data between two validations."""
        states = own_states(self.data_adapter)
        return {"passes": self._passes, "states": states, "ahead": self.draws_ahead}

    def begin_at(self, position: dict[str, Any]) -> None:
        """Begin the next validation where another run would continue."""
        adapter = self.data_adapter
        self.draws_ahead = position["ahead"]
        self._passes = position["passes"]
        here = adapter_here(adapter)
        for _ in range(self._passes if isinstance(here, TFDatasetAdapter) else 0):
            iter(here.get_tf_dataset())  # making the iterator draws the seed of a pass
        put_own_states(adapter, position["states"])

    def _get_iterator(self) -> Iterator[Any]:
        batches = super()._get_iterator()

        def counted() -> Iterator[Any]:
            self._passes += 1
            yield from batches

        return counted()


class PredictionPosition(EpochIterator):  # type: ignore[misc]  # Keras has no types
    """An iterator over the batches of one `predict`, which can begin after some of them.

    This is a mixin before an engine's iterator. Batches may be drawn ahead: the count and the
    checksum are those of the batches that steps have taken. The checksum is that of the rows of
    this process, where each brings its own.
    """

    _skipped = _wanted = 0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._taken = 0, 0

    def position(self) -> tuple[int, int]:
        """Return the number of batches that steps have taken, and their checksum."""
        return self._taken

    def begin_at(self, batches: int, check: int) -> None:
        """Begin after the batches of an earlier call.

        Args:
            batches: Their number.
            check: Their checksum.

        Raises:
            PredictionFileError: If this call has fewer steps.
        """
        if self.steps_per_epoch and self.steps_per_epoch < batches:
            raise PredictionFileError(
                f"steps={self.steps_per_epoch} was given, but predictions of {batches:,} steps "
                "are already written.\nPass the same steps as before, or a different path. Or "
                "remove the .partial folder to start again."
            )
        self._skipped, self._wanted = batches, check

    def _enumerate_iterator(self) -> Iterator[Any]:
        for first, last, iterator in super()._enumerate_iterator():
            # The first execution may begin in the middle: it draws as many batches as another one.
            is_over = self._taken[0] >= (self.num_batches or math.inf)
            if last >= self._skipped and not is_over:
                yield first, last, iterator
        if self._taken[0] < self._skipped:  # no step was left, which had read the data
            next(iter(self._get_iterator()), None)

    def _get_iterator(self) -> Iterator[Any]:
        number = check = 0
        counts = self.data_adapter.counted_rows() if brings_own_rows(self.data_adapter) else None
        for number, batch in enumerate(super()._get_iterator(), 1):
            mine = batch if counts is None else rows_of_process(batch, counts.popleft())
            check = checksum(mine, check)
            if number >= self._skipped:
                self._compare(number, check)
                self._taken = number, check
            if number > self._skipped:
                yield batch
        if number < self._skipped:
            self._compare(number, check)

    def _compare(self, number: int, check: int) -> None:
        if number < self._skipped:
            raise PredictionFileError(
                f"Predictions of {counted(self._skipped, 'batch')} are already written, but the "
                f"data now end after {number:,}: they have changed.\nPass the same data as "
                "before, or a different path. Or remove the .partial folder to start again."
            )
        if number == self._skipped and check != self._wanted:
            raise PredictionFileError(
                f"Predictions of {counted(self._skipped, 'batch')} are already written, but the "
                f"first {number:,} of the data now have the checksum {check} instead of\n"
                f"{self._wanted}: the rows, their order or batch_size have changed. Pass the "
                "same data as before, or\n"
                "a different path. Or remove the .partial folder to start again."
            )


@functools.cache
def recorded_type(kind: Kind, iterator: type[Any]) -> Any:
    """Return a subclass of an iterator that knows its position in the data."""
    position = {TRAIN: TrainingPosition, TEST: ValidationPosition, PREDICT: PredictionPosition}
    # A prediction may draw batches ahead.
    attributes = {"recorded": kind is not PREDICT}
    return type(f"Recorded{iterator.__name__}", (position[kind], iterator), attributes)
