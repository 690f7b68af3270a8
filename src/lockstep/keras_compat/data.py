"""Private attributes and methods of Keras's data adapters."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.keras_compat.foreign_patches import replaced
from lockstep.keras_compat.rows import (
    ArrayDataAdapter,
    PyDatasetAdapter,
    TorchDataLoaderAdapter,
    _call,
    _named,
    _read,
    _read_and_write,
    _serialization_lib,
)
from lockstep.keras_compat.trainers import _FROM_3_16

# keras/src/trainers/data_adapters/*.py

inputs_of = _read(ArrayDataAdapter, "_inputs")
"""The arrays of an `ArrayDataAdapter`."""
number_of_rows = _read(ArrayDataAdapter, "_num_samples", None)
"""The rows of an `ArrayDataAdapter`; `None` for other data."""
batch_size_of: Callable[[Any], int] = _read(ArrayDataAdapter, "_batch_size")
"""The rows of a batch of an `ArrayDataAdapter`."""
shuffle_of = _read(ArrayDataAdapter, "_shuffle")
"""How an `ArrayDataAdapter` shuffles: `True`, `False` or `"batch"`."""
_pass_over = _call(ArrayDataAdapter, "_get_iterator")
loader_of = _read(TorchDataLoaderAdapter, "_dataloader")
"""The `DataLoader` of a `TorchDataLoaderAdapter`."""
standardized = _call(PyDatasetAdapter, "_standardize_batch")
"""A batch of a `PyDataset` in the structure of `fit`, with its class weights."""
epoch_of, set_epoch = _read_and_write(ArrayDataAdapter if _FROM_3_16 else None, "_epoch", None)
"""What an adapter seeds its shuffle with; `None` where it draws from the process, up to 3.15."""
_RECORD = _named(_serialization_lib, "record_object_after_serialization")


def has_workers(adapter: Any) -> bool:
    """Whether threads or processes of a `PyDataset` make the batches."""
    return isinstance(adapter, PyDatasetAdapter) and adapter.enqueuer is not None


def drop_queued(adapter: Any) -> None:
    """Discard the batches that workers of a `PyDataset` made ready for a pass that is over.

    Keras 3.15.1 keeps them for the next pass. After the batch that a model is built on, the next
    pass would repeat some rows and miss others.
    """
    # PyDatasetEnqueuer.stop and OrderedEnqueuer._run, of py_dataset_adapter.py
    if not has_workers(adapter):
        return
    ready = adapter.enqueuer.ready_queue
    with ready.mutex:
        ready.queue.clear()
    if adapter.num_batches is None:  # otherwise each start of the workers begins anew
        adapter.enqueuer.indices = itertools.count()


def row_indices(adapter: Any) -> Any:
    """The rows of each batch of one pass over arrays, in the order that Keras would take.

    Keras draws the order when the first batch is asked for.

    Returns:
        An iterator of slices, or of arrays of row numbers.
    """
    return _pass_over(adapter, lambda _, indices: indices, inputs=0)


@contextmanager
def serialized_objects_kept() -> Iterator[None]:
    """Let Keras load a `.keras` file without mistaking one layer for another.

    `Bidirectional` serializes its layer while a file is loaded. Keras identifies the layer by
    its `id`, and another layer gets the same `id` once the first one is freed. This context
    keeps every serialized object until the load ends. Source: `ObjectSharingScope` in
    keras/src/saving/serialization_lib.py.
    """
    kept: list[Any] = []
    record = getattr(_serialization_lib, _RECORD)

    def keep_and_record(obj: Any, config: dict[str, Any]) -> None:
        kept.append(obj)
        record(obj, config)

    with replaced([(_serialization_lib, _RECORD, keep_and_record)]):
        yield
