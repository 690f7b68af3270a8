"""Where the batches of an epoch come from: fresh host arrays, one after the other."""

import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from lockstep.engines.jax.on_devices.arrays import Arrays, plain_arrays, row_numbers
from lockstep.engines.jax.on_devices.resident import Chosen, Resident
from lockstep.engines.jax.several import processes
from lockstep.engines.jax.several.agreement import Pull, Seen
from lockstep.engines.jax.several.assigned import Assigned
from lockstep.engines.jax.steps import prefetched
from lockstep.engines.jax.steps.ahead import Ahead
from lockstep.engines.jax.steps.pace import Pace
from lockstep.engines.jax.steps.scan import AUTO, check_times


class HostIterator(EpochIterator):  # type: ignore[misc]
    """Keras's iterator over epochs, with host arrays that nobody else writes into.

    A step runs while Python goes on, and JAX may read a host array in place for as
    long. Who yields one array again and again, with new rows in it each time, would
    train on rows of the next batch.

    Keras's own for JAX puts each batch on the first device of an accelerator.

    Attributes:
        pace: Says how many steps each execution takes; `None` for `steps_per_execution`.
        unseen: Whether nobody looks between two steps, which are handed over as they come.
        in_place: Whether steps may read the memory of the user's arrays, where nobody looks between
            two steps: all of them are waited for before the call returns.
        gives_arrays: Whether every batch of this pass is one that `Arrays.native` is true of.
        data: The data on the devices; `None` where batches go from the host.
        decided: Whether it has been decided where the data are.
        skip: How many batches of arrays the next pass leaves out, in order and random numbers
            as if it had given them.
        ahead: What was drawn ahead of its turn.
        prefetch: How many batches a thread makes ready before their turn.
        broke_off: What was raised last when batches were asked for.
        recorded: Whether a checkpoint asks for the position, that of the batches trained.
    """

    unseen = False
    in_place = False
    gives_arrays = False
    skip = 0
    prefetch = 0
    recorded = False
    broke_off: Exception | None = None
    _looked = False
    _steps: Iterator[Any] = iter(())
    _prefetched: prefetched.Prefetched | None = None
    _generator: prefetched.OneGenerator | None = None

    # keras/src/backend/jax/trainer.py, JAXEpochIterator; and the base class,
    # keras/src/trainers/epoch_iterator.py, which calls both.

    def __init__(self, *args: Any, steps_per_execution: Any = 1, **kwargs: Any) -> None:
        check_times(steps_per_execution)
        self.pace: Pace | None = None
        self.data: Resident | None = None
        self.decided = False
        self.ahead = Ahead()
        times = 1 if steps_per_execution == AUTO else steps_per_execution
        # Before the data are looked at, which may fail here alone.
        self._seen = Seen(every_pull=True) if processes.several() else None
        super().__init__(*args, steps_per_execution=times, **kwargs)
        self._trust_arrays()

    def __next__(self) -> Any:
        return next(self._epoch_iterator)

    def reset(self) -> None:
        """Forget what was taken to look at, as Keras does before the first step."""
        super().reset()
        # Of both, Keras, in whose hands a released model is, does not know.
        self.pace, self.unseen = None, False
        self.ahead = Ahead()
        self.prefetch, self._prefetched = 0, None
        if self._seen is not None:
            self._seen.close()
            self._seen = Seen(every_pull=True)
            self._trust_arrays()

    def _trust_arrays(self) -> None:
        if self._seen is not None:
            # They have as many batches as they say, and give them without an error.
            self._seen.every_pull = not isinstance(self.data_adapter, ArrayDataAdapter)

    def _enumerate_iterator(self) -> Iterator[tuple[int, int, Iterator[Any]]]:
        self._looked = False
        if self._prefetched is not None:  # an epoch may go on with the pass of the one before
            self._prefetched.begin_epoch(self.prefetch, self.num_batches)
        steps: Iterator[tuple[int, int, Iterator[Any]]] = super()._enumerate_iterator()
        if self.pace is not None:
            return self._paced(steps, self.pace.next)
        return self._paced(steps, _all_of_them) if self.unseen else steps

    def _paced(
        self,
        steps: Iterator[tuple[int, int, Iterator[Any]]],
        times: Callable[[int | None], int],
    ) -> Iterator[tuple[int, int, Iterator[Any]]]:
        number = self.num_batches
        self._steps = steps
        for first, _, iterator in steps:
            left = None if number is None else number - first
            if left is not None and self._num_batches:  # of a pass, which epochs may share
                left = min(left, self._num_batches - self._steps_seen + 1)
            yield first, first + times(left) - 1, iterator

    def took(self, first: int, steps: int) -> int:
        """So many steps had a batch, maybe fewer than were to; the number of the last one."""
        for _ in islice(self._steps, steps - 1):  # which counts them
            pass
        return first + steps - 1

    def _get_iterator(self) -> Iterator[Any]:
        batches = self._batches()
        return batches if self._seen is None else self._seen.each(batches)

    def agreed(self, pull: Pull, assigned: Assigned | None = None) -> list[Any]:
        """What `pull` takes out of an iterator, where every process can go on with as much."""
        if self._seen is None:
            try:
                return pull()
            except Exception as error:
                self.broke_off = error
                raise
        # keras/src/trainers/data_adapters/array_data_adapter.py, ArrayDataAdapter.__init__
        rows = getattr(self.data_adapter, "_num_samples", None)
        return self._seen.agreed(pull, (self.num_batches, rows), assigned)

    def build(self, building: Callable[[], object]) -> None:
        """Let the model be built on the first batch, and begin anew."""
        self.agreed(lambda: [building()])
        self.reset()

    def may_look_ahead(self, step: int) -> bool:
        """Whether the batches of this step and after may be drawn before their turn.

        Not past the end of an epoch, where a generator could lose them; nor where steps are
        timed, or data are on the devices.
        """
        free = self.pace is None and self.data is None and not self.recorded
        return free and (self.num_batches is None or step < self.num_batches)

    def at_most(self, times: int) -> int:
        """How many batches so many steps can have: of arrays, no more than a pass has."""
        known = isinstance(self.data_adapter, ArrayDataAdapter)  # others may grow between epochs
        return min(times, max(1, self.data_adapter.num_batches)) if known else times

    def watch(self, watched: bool) -> None:
        """Say whether callbacks come between two steps, and may stop or fail in one process."""
        if self._seen is not None:
            self._seen.watched = watched

    def check_epoch(self) -> None:
        """Raise where another process took other batches in the epoch that ends here."""
        if self._seen is not None:
            self._seen.check()

    def _batches(self) -> Iterator[Any]:
        data = self.data
        self.gives_arrays = False
        if data is not None and not data.gone:
            # Where Keras casts, a pass has the values that were there when it began.
            watched = plain_arrays(self.data_adapter) if data.watched else None
            return self._chosen(data, watched or data.arrays, self.skip)
        arrays = plain_arrays(self.data_adapter)
        if arrays is not None:
            rows = row_numbers(self.data_adapter, self.skip)
            if not self.prefetch:
                self.gives_arrays = arrays.native
                return map(arrays.view if self.unseen and self.in_place else arrays.batch, rows)
            return self._made(prefetched.of_rows(rows, arrays.batch))
        batches = self._source()
        batches = _fresh(islice(batches, self.skip, None) if self.skip else batches)
        adapter = self.data_adapter
        if self.prefetch and isinstance(adapter, GeneratorDataAdapter) and not self._generator:
            self._generator = prefetched.OneGenerator(len(adapter._first_batches))
        if self._generator is not None:
            return self._made(self._generator.next_pass(batches))
        return self._made(prefetched.of(batches)) if self.prefetch else batches

    def _made(self, made: prefetched.Prefetched) -> prefetched.Prefetched:
        self.settle(waiting=False)  # the pass before, whose thread would end a little later
        made.begin_epoch(self.prefetch, self.num_batches)
        self._prefetched = made
        return made

    def settle(self, waiting: bool = True) -> None:
        """Let no other thread go on drawing batches; wait for the one that it is at."""
        if self._prefetched is not None:
            self._prefetched.settle(waiting)

    def _source(self) -> Any:
        return self.data_adapter.get_jax_iterator()

    def _chosen(self, data: Resident, arrays: Arrays, skip: int) -> Iterator[Any]:
        for rows in row_numbers(self.data_adapter, skip):
            if data.gone:
                yield arrays.batch(rows)
                continue
            if data.watched and not self._looked:  # in every epoch, of which a pass may have many
                data.refresh(arrays)
                self._looked = True
            if isinstance(rows, slice):
                rows = np.arange(rows.start, rows.stop)
            yield Chosen(rows.astype("int32"), data)


def _all_of_them(left: int | None) -> int:
    return sys.maxsize if left is None else left


def _fresh(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        yield keras.tree.map_structure(_copied, batch)


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
