"""The batches of data of which each process has its own rows."""

import functools
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from lockstep.core.process_local import ProcessLocal, is_generator
from lockstep.errors import LockstepWarning, ProcessesDisagree, UnusableData
from lockstep.keras_compat import (
    ArrayDataAdapter,
    DataAdapter,
    GeneratorDataAdapter,
    TFDatasetAdapter,
    TorchDataLoaderAdapter,
    get_data_adapter,
    loader_of,
)
from lockstep.processes.call_scope import CALLS
from lockstep.processes.coordination import once
from lockstep.processes.group import current
from lockstep.processes.process_group import several
from lockstep.processes.row_exchange import Counts, RowExchange


def global_data(data: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an iterator over global batches.

    Args:
        data: Those of Keras's `EpochIterator`, where `x` may be rows of this process.

    Raises:
        ProcessesDisagree: If another process was given data of the other kind.
    """
    own: Any = data.get("x")
    is_own = isinstance(own, ProcessLocal)
    if several():
        least, greatest = once([is_own, current().rank])
        if least[0] != greatest[0]:
            raise ProcessesDisagree(
                f"Process {greatest[1]} was given lockstep.process_local, and process {least[1]} "
                "plain data, of which\nevery process has all rows. Wrap the data in every process, "
                "or in none."
            )
    if not is_own:
        return data
    if several():
        return {"x": OwnRows(own, data), **_kept(data)}
    if own.makes_batches is not None:
        _check_class_weight(data)
        return {"x": _Passes(own.data), **_kept(data)}
    x, y, sample_weight = own.parts
    return {**data, "x": x, "y": y, "sample_weight": sample_weight}


def _kept(data: dict[str, Any]) -> dict[str, Any]:
    """Return what an adapter that is made already does not take."""
    return {name: data[name] for name in _OF_STEPS if name in data}


_OF_STEPS = ("steps_per_epoch", "steps_per_execution")


def share_of_batch(batch_size: int, rank: int, size: int) -> int:
    """Return the rows of a process in a global batch of arrays.

    Raises:
        UnusableData: If there are fewer rows than processes.
    """
    if batch_size < size:
        raise UnusableData(
            f"batch_size={batch_size} was asked for, and it is that of the global batch: {size} "
            f"processes bring rows.\nGive at least {size}."
        )
    return batch_size // size + (rank < batch_size % size)


def joining_rows(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that takes one batch: rows of each process are joined first.

    Args:
        name: The name of the method. `predict_on_batch` returns the rows of this process.
        method: The method.
    """

    @functools.wraps(method)
    def method_on_own_rows(*args: Any, **kwargs: Any) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        own = {key: value for key, value in given.items() if isinstance(value, ProcessLocal)}
        if not own:
            return method(*args, **kwargs)
        if not several():
            given |= {key: value.data for key, value in own.items()}
            return _called(method, given)
        for key, value in given.items():
            if key not in own and value is not None and key in (0, 1, 2, *_OF_ROWS):
                raise UnusableData(
                    f"{name} was given rows of this process, and beside them a "
                    f"{type(value).__name__} of all rows.\n"
                    "Wrap each: x, y and sample_weight, by lockstep.process_local."
                )
        with CALLS.call(name):
            rows = RowExchange()
            found = rows.joined(tuple(value.data for value in own.values()), ended=False)
            rows.close()
            assert found is not None  # there is a batch
            batch, counts = found
            result = _called(method, given | dict(zip(own, batch, strict=True)))
        if name != "predict_on_batch":
            return result
        return keras.tree.map_structure(lambda leaf: leaf[counts.mine], result)

    return method_on_own_rows


def _called(method: Callable[..., Any], given: dict[Any, Any]) -> Any:
    args = [value for key, value in given.items() if isinstance(key, int)]
    return method(*args, **{key: v for key, v in given.items() if not isinstance(key, int)})


_OF_ROWS = ("x", "y", "sample_weight")


class _Passes(DataAdapter):  # type: ignore[misc]  # Keras has no types
    """Batches that a function yields, in one pass after another, or a generator, in one pass.

    Args:
        data: The function, or the generator.
    """

    num_batches = batch_size = has_partial_batch = partial_batch_size = None

    def __init__(self, data: Any) -> None:
        self._data = data
        # Keras draws a batch to build the model, which is the first one of the epoch all the same.
        self._looked_at = list(itertools.islice(data, 1)) if is_generator(data) else []

    def _batches(self) -> Iterator[Any]:
        if not is_generator(self._data):
            yield from self._data()
            return
        yield from self._looked_at
        self._looked_at = []
        # `yield from` would close the generator where a pass is left.
        yield from map(_itself, self._data)

    def _of_keras(self) -> Any:
        batches = self._batches()
        first = list(itertools.islice(batches, 1))
        if not first:
            return None  # Keras refuses a generator without a batch
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
        adapter.generator = self._data
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
        drawn: The rows of each process in the batches so far, for a prediction.
    """

    def __init__(self, own: ProcessLocal, given: dict[str, Any]) -> None:
        self.random = own.random
        self._steps: int | None = given.get("steps_per_epoch")
        self.drawn: deque[Counts] = deque()
        self._pass = 0
        self._has_rows = False
        self._rows = RowExchange(_warn)
        with own.random.drawn():
            self.adapter = _adapter_of(own, given)
            number = self.adapter.num_batches
        self.ends_once = bool(self._rows.agreed(is_generator(own.data)))
        self.draws_seeds = bool(self._rows.agreed(isinstance(self.adapter, TFDatasetAdapter)))
        agreed = self._rows.agreed(number)
        # With steps, a process that has ended begins anew at the end of an epoch.
        self._num_batches = None if self._steps else agreed

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Yield the global batches."""
        self._pass += 1
        this, number = self._pass, 0
        batches, ended = self._new_pass(), False
        while this == self._pass:
            if ended and self._steps and number % self._steps == 0:
                batches, ended = self._new_pass(), False
            batch = None
            if not ended:
                with self.random.drawn():
                    batch = next(batches, _END)
                ended = batch is _END
            found = self._rows.joined(batch, ended)
            if found is None:
                self._rows.close()
                if not self._has_rows:
                    raise UnusableData(
                        "The data of process_local have no batch in any process, and at least 1 is "
                        "needed.\nCheck the files or rows that the processes were given."
                    )
                return
            self._has_rows = True
            number += 1
            joined, counts = found
            self.drawn.append(counts)
            yield joined

    def _new_pass(self) -> Iterator[Any]:
        with self.random.drawn():
            return iter(self.adapter.get_numpy_iterator())

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

    def of_all(self, mine: bytes) -> list[np.ndarray]:
        """Return the bytes of every process, given those of this one."""
        return self._rows.of_all(mine)

    def reset(self) -> None:
        """Forget what was drawn to build the model."""
        self._pass += 1
        enqueuer = getattr(self.adapter, "enqueuer", None)
        if enqueuer is not None:
            # Keras would put the queued batches before those of the first epoch.
            with enqueuer.ready_queue.mutex:
                enqueuer.ready_queue.queue.clear()

    @property
    def num_batches(self) -> int | None:
        """The number of global batches: the greatest of all processes."""
        return self._num_batches

    batch_size = has_partial_batch = partial_batch_size = None


_END = object()


def _itself(batch: Any) -> Any:
    return batch


def _adapter_of(own: ProcessLocal, given: dict[str, Any]) -> Any:
    """Return Keras's adapter of the data of this process."""
    data, class_weight = own.data, given.get("class_weight")
    if own.makes_batches is not None or is_generator(data):
        _check_class_weight(given)
        return _Passes(data)
    x, y, sample_weight = own.parts
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


def _check_class_weight(given: dict[str, Any]) -> None:
    if given.get("class_weight") is not None:
        raise UnusableData(
            "class_weight was given, and Keras takes none with a generator or a function.\n"
            "Yield sample weights: (x, y, sample_weight)."
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
            f"The DistributedSampler has {rows} rows for {replicas} processes, and repeats "
            f"{sampler.total_size - rows} of them, which would count twice.\n"
            "Give the DataLoader torch.utils.data.Subset(dataset, range(rank, len(dataset), size)) "
            "in its place."
        )


def _warn(said: str) -> None:
    warnings.warn(said, LockstepWarning, stacklevel=2)
