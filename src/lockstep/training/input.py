"""The batches of an epoch, as fresh host arrays."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from numbers import Integral
from typing import Any

import keras
import numpy as np

from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import (
    ArrayDataAdapter,
    EpochIterator,
    GeneratorDataAdapter,
    number_looked_at,
    number_of_rows,
)
from lockstep.training import prefetch_queue
from lockstep.training.arrays import plain_arrays, row_numbers


@dataclass(frozen=True)
class InputPolicy:
    """Describe how the batches of one epoch are drawn. It is set before the epoch begins.

    Attributes:
        no_batch_hooks: Whether no callback runs between two steps. Steps then run as batches
            arrive.
        in_place: Whether steps may read the user's arrays in place if there are no batch hooks. The
            call waits for all steps before it returns.
        data: The data on the devices; `None` if batches come from the host.
        prefetch: The number of batches that a thread prepares in advance.
    """

    no_batch_hooks: bool = False
    in_place: bool = False
    data: Any = None
    prefetch: int = 0


class HostIterator(EpochIterator):  # type: ignore[misc]
    """Keras's epoch iterator, with host arrays that no other code writes into.

    A framework may read a host array in place while a step runs and Python continues. A generator
    that yields the same array again, with new rows, would make the step train on rows of the next
    batch.

    Attributes:
        policy: How the batches of this epoch are drawn.
        gives_arrays: Whether `Arrays.native` is true of every batch of this pass.
        decided: Whether the location of the data has been decided.
        skip: The number of batches that the next pass skips. The order and the random numbers are
            those of a full pass.
        recorded: Whether a checkpoint records the position of the trained batches.
    """

    policy = InputPolicy()
    gives_arrays = False
    decided = False
    skip = 0
    recorded = False
    _steps: Iterator[Any] = iter(())
    _prefetched: prefetch_queue.Prefetched | None = None
    _generator: prefetch_queue.OneGenerator | None = None

    # keras/src/trainers/epoch_iterator.py, EpochIterator

    def __init__(self, *args: Any, steps_per_execution: Any = 1, **kwargs: Any) -> None:
        check_times(steps_per_execution)
        # Before the data are inspected, which may fail in this process alone.
        self._seen = self._new_check()
        super().__init__(*args, steps_per_execution=steps_per_execution, **kwargs)
        self._trust_arrays()

    def __next__(self) -> Any:
        return next(self._epoch_iterator)

    def reset(self) -> None:
        """Discard the batches drawn for inspection, as Keras does before the first step."""
        super().reset()
        # An overridden method may call Keras's `evaluate`, which plans no epoch.
        self.policy = replace(self.policy, no_batch_hooks=False, prefetch=0)
        self._prefetched = None
        if self._seen is not None:
            self._seen.close()
            self._seen = self._new_check()
            self._trust_arrays()

    def _new_check(self) -> Any:
        """Return a comparison of the batches of several processes, `None` for one process."""
        return None

    def _trust_arrays(self) -> None:
        if self._seen is not None:
            # Arrays have a known number of batches and raise no error when drawn.
            self._seen.every_pull = not isinstance(self.data_adapter, ArrayDataAdapter)

    def _enumerate_iterator(self) -> Iterator[tuple[int, int, Iterator[Any]]]:
        if self._prefetched is not None:  # an epoch may continue the last pass
            self._prefetched.begin_epoch(self.policy.prefetch, self.num_batches)
        steps: Iterator[tuple[int, int, Iterator[Any]]] = super()._enumerate_iterator()
        return self._all_at_once(steps) if self.policy.no_batch_hooks else steps

    def _all_at_once(
        self, steps: Iterator[tuple[int, int, Iterator[Any]]]
    ) -> Iterator[tuple[int, int, Iterator[Any]]]:
        """Yield the remaining steps of the epoch as one execution.

        The loop reports the number of steps that ran to `took`.
        """
        number = self.num_batches
        self._steps = steps
        for first, _, iterator in steps:
            left = sys.maxsize if number is None else number - first
            if number is not None and self._num_batches:  # of a pass; epochs may share one
                left = min(left, self._num_batches - self._steps_seen + 1)
            yield first, first + left - 1, iterator

    def took(self, first: int, steps: int) -> int:
        """Record that `steps` steps had a batch, and return the number of the last one."""
        for _ in islice(self._steps, steps - 1):  # the iterator counts the steps
            pass
        return first + steps - 1

    def _get_iterator(self) -> Iterator[Any]:
        batches = self._batches()
        return batches if self._seen is None else iter(self._seen.each(batches))

    def agreed(self, pull: Callable[[], list[Any]], assigned: Any = None) -> list[Any]:
        """Return the batches that `pull` draws, once all processes have drawn as many."""
        if self._seen is None:
            return pull()
        rows = number_of_rows(self.data_adapter)
        drawn: list[Any] = self._seen.agreed(pull, (self.num_batches, rows), assigned)
        return drawn

    def build(self, building: Callable[[], object]) -> None:
        """Build the model on the first batch, then reset the iterator."""
        self.agreed(lambda: [building()])
        self.reset()

    def at_most(self, times: int) -> int:
        """Return the largest number of batches for `times` steps: arrays limit it to one pass."""
        known = isinstance(self.data_adapter, ArrayDataAdapter)  # others may grow between epochs
        return min(times, max(1, self.data_adapter.num_batches)) if known else times

    def watch(self, watched: bool) -> None:
        """Set whether callbacks run between steps. They may stop or fail in one process alone."""
        if self._seen is not None:
            self._seen.watched = watched

    def check_epoch(self) -> None:
        """Raise if another process drew different batches in this epoch."""
        if self._seen is not None:
            self._seen.check()

    def _batches(self) -> Iterator[Any]:
        policy = self.policy
        self.gives_arrays = False
        arrays = plain_arrays(self.data_adapter)
        if arrays is not None:
            rows = row_numbers(self.data_adapter, self.skip)
            if not policy.prefetch:
                self.gives_arrays = arrays.native
                in_place = policy.no_batch_hooks and policy.in_place
                return map(arrays.view if in_place else arrays.batch, rows)
            return self._made(prefetch_queue.of_rows(rows, arrays.batch))
        batches = self._source()
        batches = _fresh(islice(batches, self.skip, None) if self.skip else batches)
        adapter = self.data_adapter
        if policy.prefetch and isinstance(adapter, GeneratorDataAdapter) and not self._generator:
            self._generator = prefetch_queue.OneGenerator(number_looked_at(adapter))
        if self._generator is not None:
            return self._made(self._generator.next_pass(batches))
        return self._made(prefetch_queue.of(batches)) if policy.prefetch else batches

    def _made(self, made: prefetch_queue.Prefetched) -> prefetch_queue.Prefetched:
        self.settle(waiting=False)  # the last pass, whose thread would end later
        made.begin_epoch(self.policy.prefetch, self.num_batches)
        self._prefetched = made
        return made

    def settle(self, waiting: bool = True) -> None:
        """Stop the prefetch thread, and optionally wait for the batch in progress."""
        if self._prefetched is not None:
            self._prefetched.settle(waiting)

    def _source(self) -> Any:
        return self.data_adapter.get_numpy_iterator()


def check_times(times: object) -> None:
    """Check that `steps_per_execution` is a whole number of at least 1.

    Raises:
        UnsupportedModel: If it is not.
    """
    if not isinstance(times, Integral) or times < 1:
        raise UnsupportedModel(
            f"compile(steps_per_execution={times!r}) was asked for, and a whole number of at least "
            "1 is needed.\nTry 10; lockstep bench suggests a number."
        )


def _fresh(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        yield keras.tree.map_structure(_copied, batch)


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
