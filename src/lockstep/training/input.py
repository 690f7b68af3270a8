"""The batches of an epoch, as fresh host arrays."""

import functools
from collections.abc import Callable, Iterator
from itertools import islice
from numbers import Integral
from typing import Any

import keras
import numpy as np

from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import (
    ArrayDataAdapter,
    EpochIterator,
    backend_iterator,
    batch_size_of,
    drop_queued,
    number_of_rows,
)
from lockstep.processes.own_rows import OwnRows, Passes
from lockstep.training.arrays import plain_arrays, row_numbers


class AnewAfterReset(EpochIterator):  # type: ignore[misc]
    """Keras's epoch iterator, whose next pass after a reset begins with the first batch."""

    def reset(self) -> None:
        """Discard the batches drawn for inspection, and those that workers have made ready."""
        super().reset()
        drop_queued(self.data_adapter)


class HostIterator(AnewAfterReset):
    """Keras's epoch iterator, with host arrays that no other code writes into.

    A framework may read a host array in place while a step runs and Python continues. A generator
    that yields the same array again, with new rows, would make the step train on rows of the next
    batch.

    Attributes:
        skip: The number of batches that the next pass skips. The order and the random numbers are
            those of a full pass.
        recorded: Whether a checkpoint records the position of the trained batches.
        watched: Whether callbacks run between steps. They may write into the arrays.
        copies: Whether code could write into rows of the data set that a step still reads.
        at_once: Whether `steps_per_execution` is that of `run_at_once`, and not of the user.
        draws_ahead: Whether a batch is drawn before the step of the batch before it begins, as
            Keras does on JAX with accelerators. Data that draw global random numbers then draw
            other ones than in turn, if callbacks draw some too. A resumed run does as the run did
            that it continues.
        last_drawn: The last batch that was drawn ahead, `None` for none.
    """

    skip = 0
    draws_ahead = False
    last_drawn: Any = None
    recorded = False
    watched = True
    copies = True
    at_once = False

    # keras/src/trainers/epoch_iterator.py, EpochIterator

    def __init__(self, *args: Any, steps_per_execution: Any = 1, **kwargs: Any) -> None:
        check_times(steps_per_execution)
        # Before the data are inspected, which may fail in this process alone.
        self._seen = self._new_check()
        super().__init__(*args, steps_per_execution=steps_per_execution, **kwargs)
        self._trust_arrays()

    def __next__(self) -> Any:
        return next(self._epoch_iterator)

    def _enumerate_iterator(self) -> Iterator[Any]:
        for first, last, iterator in super()._enumerate_iterator():
            # Keras's own last execution of an epoch counts steps that it does not have.
            yield first, min(last, self.num_batches - 1) if self.at_once else last, iterator

    def _interrupted_warning(self) -> None:
        # Rows of each process have a length that is known at their end alone. A pass without a
        # batch trains nothing: a generator that has ended before.
        data = self.data_adapter
        if self.steps_per_epoch or not isinstance(data, OwnRows | Passes) or not data.is_used:
            super()._interrupted_warning()

    def reset(self) -> None:
        """Discard the batches drawn for inspection, as Keras does before the first step."""
        super().reset()
        if isinstance(self.data_adapter, OwnRows):
            self.data_adapter.reset()
        if self._seen is not None:
            self._seen.close()
            self._seen = self._new_check()
            self._trust_arrays()

    def _new_check(self) -> Any:
        """Return a comparison of the batches of several processes, `None` for one process."""
        return None

    def _trust_arrays(self) -> None:
        if self._seen is not None:
            # Arrays have a known number of batches and raise no error when drawn. Processes that
            # join their rows agree on each batch by themselves.
            is_joined = self._seen.is_joined = isinstance(self.data_adapter, OwnRows)
            is_safe = is_joined or isinstance(self.data_adapter, ArrayDataAdapter)
            self._seen.every_pull = not is_safe

    def _get_iterator(self) -> Iterator[Any]:
        batches = self._batches()
        return batches if self._seen is None else iter(self._seen.each(batches))

    def agreed(self, pull: Callable[[], list[Any]], assigned: Any = None) -> list[Any]:
        """Return the batches that `pull` draws, once all processes have drawn as many."""
        if self._seen is None:
            return pull()
        rows = number_of_rows(self.data_adapter)
        known = self.num_batches, rows
        drawn: list[Any] = self._seen.agreed(pull, known, assigned, self.steps_per_epoch)
        return drawn

    def build(self, building: Callable[[], object]) -> None:
        """Build the model on the first batch, then reset the iterator."""
        self.agreed(lambda: [building()])
        self.reset()

    def at_most(self, times: int) -> int:
        """Return the largest number of batches for `times` steps: arrays limit it to one pass."""
        if times == 1 or not isinstance(self.data_adapter, ArrayDataAdapter):
            return times  # other data may grow between epochs
        batches: int = self.data_adapter.num_batches
        return min(times, max(1, batches))

    def full_batches(self) -> int:
        """Return the number of batches of a pass over arrays with all of their rows, else 0."""
        if self.steps_per_epoch or plain_arrays(self.data_adapter) is None:
            return 0
        full: int = number_of_rows(self.data_adapter) // batch_size_of(self.data_adapter)
        return full

    def may_run_at_once(self, model: Any) -> bool:
        """Return whether several training steps of `model` may run as one program."""
        return False

    def run_at_once(self, steps: int) -> None:
        """Let each execution have so many steps, or those that remain of an epoch."""
        self.steps_per_execution, self.at_once = steps, True

    def watch(self, watched: bool) -> None:
        """Set whether callbacks run between steps. They may stop or fail in one process alone."""
        self.watched = watched
        if self._seen is not None:
            self._seen.watched = watched

    def check_epoch(self) -> None:
        """Raise if another process drew different batches in this epoch."""
        if isinstance(self.data_adapter, OwnRows):
            self.data_adapter.end_epoch()
        if self._seen is not None:
            self._seen.check()

    def _batches(self) -> Iterator[Any]:
        arrays = plain_arrays(self.data_adapter)
        if arrays is not None:
            every = row_numbers(self.data_adapter, self.skip)
            return (arrays.batch(rows, copied=self.copies) for rows in every)
        batches = self._source()
        return _fresh(islice(batches, self.skip, None) if self.skip else batches)

    def _source(self) -> Any:
        return self.data_adapter.get_numpy_iterator()


@functools.cache
def iterator_of_keras() -> Any:
    """Return the iterator that Keras has on this backend, whose passes begin anew after a reset."""
    plain = backend_iterator()
    return type(plain.__name__, (AnewAfterReset, plain), {})


class BatchesAhead:
    """Transfers each batch to the devices before the step of the previous batch starts.

    JAX sends a batch once the device has done all steps that were begun: behind a step, the device
    waits for the batch. Keras draws one batch ahead on accelerators too.

    Args:
        place: Puts a host batch on the devices.
    """

    # keras/src/backend/jax/trainer.py, JAXEpochIterator._one_batch_ahead_iterator

    def __init__(self, place: Callable[[Any], Any]) -> None:
        self._place = place
        self._ready: tuple[Any, Any] | None = None

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the host batches, each when the next one is under way."""
        before: tuple[Any, Any] | None = None
        for batch in batches:
            ready = batch, self._place(batch)
            if before is not None:
                self._ready = before
                yield before[0]
            before = ready
        if before is not None:
            self._ready = before
            yield before[0]

    def placed(self, batch: Any) -> Any:
        """Return the batch on the devices: as it was put there ahead, if it was."""
        ready, self._ready = self._ready, None
        return ready[1] if ready is not None and ready[0] is batch else self._place(batch)


def drawn(iterator: Iterator[Any], times: int) -> Iterator[Any]:
    """Draw the batches of one execution.

    Raises:
        StopIteration: If no batch is left.
    """
    batches = list(islice(iterator, times))
    if not batches:
        raise StopIteration
    return iter(batches)


def check_times(times: object) -> None:
    """Check that `steps_per_execution` is a whole number of at least 1.

    Raises:
        UnsupportedModel: If it is not.
    """
    if not isinstance(times, Integral) or times < 1:
        raise UnsupportedModel(
            f"compile(steps_per_execution={times!r}) was requested, but a whole number of at "
            "least 1 is needed.\nTry 10; lockstep bench suggests a number."
        )


def _fresh(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        yield keras.tree.map_structure(_copied, batch)


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
