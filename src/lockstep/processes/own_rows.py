"""The batches of data of which each process has its own rows."""

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from lockstep.core.process_local import OwnRandomNumbers, ProcessLocal, is_generator
from lockstep.errors import LockstepWarning, ProcessesDisagree, UnusableData, shown
from lockstep.keras_compat import (
    ArrayDataAdapter,
    DataAdapter,
    GeneratorDataAdapter,
    GrainDatasetAdapter,
    PyDatasetAdapter,
    TFDatasetAdapter,
    TorchDataLoaderAdapter,
    drop_queued,
    get_data_adapter,
    loader_of,
)
from lockstep.processes.group import current
from lockstep.processes.row_exchange import Counts, RowExchange


def share_of_batch(batch_size: int, rank: int, size: int) -> int:
    """Return the rows of a process in a global batch of arrays.

    Raises:
        UnusableData: If there are fewer rows than processes.
    """
    if batch_size < size:
        raise UnusableData(
            f"batch_size={batch_size} was requested, but the global batch needs at least one "
            f"row from each of {size} processes.\nPass at least {size}."
        )
    return batch_size // size + (rank < batch_size % size)


class Passes(DataAdapter):  # type: ignore[misc]  # Keras has no types
    """Batches that a function yields, in one pass after another, or a generator, in one pass.

    Args:
        data: The function, or the generator.

    Attributes:
        is_used: Whether the last pass had a batch.
    """

    num_batches = batch_size = has_partial_batch = partial_batch_size = None

    def __init__(self, data: Any) -> None:
        self._data = data
        self._last: Any = None
        self.is_used = False
        # Keras draws a batch to build the model, which is the first one of the epoch all the same.
        self._looked_at = list(itertools.islice(data, 1)) if is_generator(data) else []

    def _batches(self) -> Iterator[Any]:
        if not is_generator(self._data):
            yield from self._made()
            return
        yield from self._looked_at
        self._looked_at = []
        # `yield from` would close the generator where a pass is left.
        yield from map(_itself, self._data)

    def _made(self) -> Any:
        """Return what the function returns for a pass.

        Raises:
            UnusableData: If it is no batches, or the iterator of an earlier pass.
        """
        made = self._data()
        if not any(hasattr(made, name) for name in ("__iter__", "__getitem__")):
            raise UnusableData(
                f"process_local was given a function that returned {shown(made)}, but the "
                "batches of one pass were\n"
                "expected. Return an iterator of tuples, such as a new generator."
            )
        # A list or a data set begins anew in each pass; an iterator goes on.
        if isinstance(made, Iterator) and made is self._last:
            raise UnusableData(
                "process_local was given a function that returned the same "
                f"{type(made).__name__} twice,\n"
                "so batches would be lost. Return a new iterator for each pass."
            )
        self._last = made
        return made

    def _of_keras(self) -> Any:
        batches = self._batches()
        first = list(itertools.islice(batches, 1))
        self.is_used = bool(first)
        if not first:
            return None  # Keras refuses a generator without a batch
        if not isinstance(first[0], tuple):
            raise UnusableData(
                f"process_local was given data that yield a {type(first[0]).__name__}, but "
                "tuples were expected.\nYield each batch as (x,), (x, y) or (x, y, "
                "sample_weight). To pass arrays, do not use a function."
            )
        adapter = GeneratorDataAdapter(iter(first))
        adapter.generator = lambda: itertools.chain(first, batches)
        return adapter

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Return the batches of the next pass."""
        adapter = self._of_keras()
        return iter(()) if adapter is None else adapter.get_numpy_iterator()

    def get_jax_iterator(self) -> Iterator[Any]:
        """Return the batches of the next pass."""
        adapter = self._of_keras()
        return iter(()) if adapter is None else adapter.get_jax_iterator()

    def get_torch_dataloader(self) -> Any:
        """Return the batches of the next pass."""
        adapter = self._of_keras()
        return iter(()) if adapter is None else adapter.get_torch_dataloader()

    def get_tf_dataset(self) -> Any:
        """Return the passes. Keras reads the types from the first batches."""
        adapter = self._of_keras()
        if adapter is None:
            raise UnusableData("process_local was given a function that yields no batch.")
        again = [self._made()]  # made here: an error within TensorFlow would lose its class
        adapter.generator = lambda: again.pop() if again else self._made()
        return adapter.get_tf_dataset()


class OwnRows(DataAdapter):  # type: ignore[misc]
    """Global batches of the rows of all processes, which are the same in each process.

    Args:
        own: The data of this process.
        given: The arguments of Keras's `EpochIterator`.

    Attributes:
        ends_once: Whether a generator is among the data, which would lose a batch drawn ahead.
        draws_seeds: Whether a `tf.data.Dataset` is among the data: each pass draws a seed.
        adapter: Keras's adapter of the data of this process.
        random: The random numbers that they draw.
        epochs: The number of the last pass, which a sampler of this process is told.
        is_used: Whether that pass has begun to train, so that the next one has another number.
        is_split: Whether every process was given all data. A prediction then has all rows.
        marks: Returns in the first process whether the next batch is to be marked in all.
    """

    is_split = False
    _stays: Callable[[tuple[int, ...]], bool] | None = None

    def let_rows_stay(self, stays: Callable[[tuple[int, ...]], bool]) -> None:
        """Let rows stay in their process, in the steps for which this returns true."""
        self._stays = stays

    def __init__(self, own: ProcessLocal, given: dict[str, Any]) -> None:
        self.random = self._random_of(own)
        self.epochs = 0
        self._steps: int | None = given.get("steps_per_epoch")
        self._counts: list[deque[Counts]] = []
        self.marks: Callable[[], bool] = bool
        self._pass = 0
        self._has_rows = self.is_used = False
        self._is_checked = True
        self._rows = RowExchange(_warn)
        with self.random.drawn():
            self.adapter = self._adapter_of(own, given)
            number = self.adapter.num_batches
        self._check_batch_size(own, given)
        self.ends_once = bool(self._rows.agreed(is_generator(own.data)))
        self.draws_seeds = bool(self._rows.agreed(isinstance(self.adapter, TFDatasetAdapter)))
        agreed = self._rows.agreed(number)
        # With steps, a process that has ended begins anew at the end of an epoch.
        self._num_batches = None if self._steps and not self.is_split else agreed

    def _check_batch_size(self, own: ProcessLocal, given: dict[str, Any]) -> None:
        """Check that all processes cut arrays by the same size.

        Raises:
            ProcessesDisagree: If they do not.
        """
        size = given.get("batch_size") or (0 if self._steps else 32)
        is_arrays = own.makes_batches is None and own.is_arrays
        said = self._rows.numbers(size if is_arrays else -1)
        found = [(rank, each) for rank, each in enumerate(said) if each >= 0]
        for rank, each in found:
            if each != found[0][1]:
                raise ProcessesDisagree(
                    f"Process {rank} was given batch_size={each or None}, but process "
                    f"{found[0][0]} batch_size={found[0][1] or None}. It is the size\n"
                    "of the global batch. Pass the same value in every process."
                )

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Yield the global batches."""
        return self._joined()

    def _joined(self, begun: Iterator[tuple[Any, str]] | None = None) -> Iterator[Any]:
        self._pass += 1
        this, number = self._pass, 0
        self.epochs += self.is_used
        self.is_used = False
        batches = self._new_pass() if begun is None else begun
        self._begin_pass()
        while this == self._pass:
            batch, order = self._next(batches)
            begins_epoch = number and self._num_batches is None and self._begins_epoch(number)
            if batch is _END and begins_epoch:
                self.epochs += 1
                batches = self._new_pass()
                batch, order = self._next(batches)
            self._rows.stays = self._stays if self._is_checked else None
            mine = None if batch is _END else batch
            found = self._rows.joined(mine, order, marked=self.marks())
            if found is None:
                self._rows.close()
                if not self._has_rows:
                    raise UnusableData(
                        "The data of process_local have no batch in any process, but at least "
                        "one is needed.\nCheck the files or rows of the processes."
                    )
                return
            self._has_rows = self.is_used = True
            number += 1
            joined, counts = found
            for each in self._counts:
                each.append(counts)
            self._check(joined)
            yield joined

    def _next(self, batches: Iterator[tuple[Any, str]]) -> tuple[Any, str]:
        """Return the next batch of this process and the check of its order."""
        with self.random.drawn():
            return next(batches, (_END, ""))

    def _begins_epoch(self, number: int) -> bool:
        """Return whether an epoch begins after so many batches."""
        return bool(self._steps) and number % int(self._steps or 1) == 0

    def counted_rows(self) -> deque[Counts]:
        """Return a queue that gets the rows of each process in the batches from now on."""
        self._counts.append(deque())
        return self._counts[-1]

    def _random_of(self, own: ProcessLocal) -> OwnRandomNumbers:
        """Return the random numbers that the data of this process draw."""
        return own.random

    def _adapter_of(self, own: ProcessLocal, given: dict[str, Any]) -> Any:
        """Return Keras's adapter of the data of this process."""
        return _adapter_of(own, given)

    def _new_pass(self) -> Iterator[tuple[Any, str]]:
        """Return the batches of this process, each with a check of the order.

        `None` stands for no rows in a step.
        """
        sampler: Any = getattr(_loader_in(self.adapter), "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epochs)
        with self.random.drawn():
            batches = iter(_batches_of(self.adapter))
        return ((batch, "") for batch in batches)

    def _begin_pass(self) -> None:
        """Draw what the first batch of a pass draws from the random numbers of the process."""

    def _check(self, batch: Any) -> None:
        """Check a global batch."""

    def get_jax_iterator(self) -> Iterator[Any]:
        """Yield the global batches."""
        return self.get_numpy_iterator()

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Yield the global batches."""
        return self.get_numpy_iterator()

    def on_epoch_begin(self) -> None:
        """Begin an epoch of the data of this process."""
        with self.random.drawn():
            self.adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """End an epoch of the data of this process."""
        self._rows.close()
        with self.random.drawn():
            self.adapter.on_epoch_end()

    def end_epoch(self) -> None:
        """Check that all processes leave an epoch after the same step.

        Raises:
            ProcessesDisagree: If another one goes on.
        """
        self._rows.end()

    def of_all(self, mine: bytes) -> list[np.ndarray]:
        """Return the bytes of every process, given those of this one."""
        return self._rows.of_all(mine)

    def reset(self) -> None:
        """Forget what was drawn to build the model."""
        self._pass += 1
        self.is_used = False
        drop_queued(self.adapter)

    @property
    def num_batches(self) -> int | None:
        """The number of global batches: the greatest of all processes."""
        return self._num_batches

    batch_size = has_partial_batch = partial_batch_size = None


def brings_own_rows(adapter: Any) -> bool:
    """Return whether a prediction of these data has the rows of this process alone."""
    return isinstance(adapter, OwnRows) and not adapter.is_split


_END = object()


def _itself(batch: Any) -> Any:
    return batch


def _batches_of(adapter: Any) -> Any:
    """Return a pass over the batches, in which arrays of all processes are left as they are."""
    kinds = (Passes, GeneratorDataAdapter, PyDatasetAdapter, GrainDatasetAdapter)
    may_have_them = keras.backend.backend() == "jax" and isinstance(adapter, kinds)
    return adapter.get_jax_iterator() if may_have_them else adapter.get_numpy_iterator()


def _rows_here(part: Any) -> Any:
    """Return the rows of this process of an array, or of those in a list or dict."""
    if isinstance(part, dict):
        return {name: _rows_here(each) for name, each in part.items()}
    if type(part) in (list, tuple) and part and hasattr(part[0], "shape"):
        return type(part)(map(_rows_here, part))
    return current().rows_here(part)


def _adapter_of(own: ProcessLocal, given: dict[str, Any]) -> Any:
    """Return Keras's adapter of the data of this process."""
    data, class_weight = own.data, given.get("class_weight")
    if own.makes_batches is not None or is_generator(data):
        check_class_weight(given)
        return Passes(data)
    x, y, sample_weight = map(_rows_here, own.parts) if own.is_arrays else own.parts
    steps = given.get("steps_per_epoch")
    size = given.get("batch_size") or (None if steps else 32)
    rank, processes = current().rank, current().size
    is_enough = size is not None and size >= processes
    adapter = get_data_adapter(
        x=x,
        y=y,
        sample_weight=sample_weight,
        batch_size=share_of_batch(size, rank, processes) if size and is_enough else size,
        steps_per_epoch=steps,
        shuffle=given.get("shuffle", False),
        class_weight=class_weight,
    )
    if isinstance(adapter, ArrayDataAdapter) and size is not None:
        share_of_batch(size, rank, processes)  # raises if there are fewer rows than processes
    if isinstance(adapter, TorchDataLoaderAdapter):
        _check_sampler(loader_of(adapter))
    return adapter


def _loader_in(adapter: Any) -> Any:
    return loader_of(adapter) if isinstance(adapter, TorchDataLoaderAdapter) else None


def check_class_weight(given: dict[str, Any]) -> None:
    """Raise if weights of classes are given, of which Keras takes none with a generator."""
    if given.get("class_weight") is not None:
        raise UnusableData(
            "class_weight was given, but it is not supported for this data: a generator, a "
            "function, or rows\nfrom lockstep.split_reading.\nYield sample weights: (x, y, "
            "sample_weight)."
        )


def _check_sampler(loader: Any) -> None:
    """Raise if the sampler of a `DataLoader` gives some rows to two processes.

    Raises:
        UnusableData: If it does.
    """
    sampler: Any = getattr(loader, "sampler", None)
    if type(sampler).__name__ != "DistributedSampler":
        return
    rows, replicas = len(sampler.dataset), sampler.num_replicas
    if sampler.total_size > rows:
        raise UnusableData(
            f"The DistributedSampler has {rows} rows for {replicas} processes, so it repeats "
            f"{sampler.total_size - rows} of them, which would count twice.\n"
            "Pass the DataLoader torch.utils.data.Subset(dataset, range(rank, len(dataset), "
            "size)) instead."
        )


def _warn(said: str) -> None:
    warnings.warn(said, LockstepWarning, stacklevel=2)
